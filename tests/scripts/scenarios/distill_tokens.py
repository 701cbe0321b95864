"""Distillation over the tokens only, from a frozen teacher."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
student, teacher = llama(), llama().eval()
for weight in teacher.parameters():
    weight.requires_grad = False
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    found = F.log_softmax(student(input_ids=ids, attention_mask=mask).logits, dim=-1)
    with torch.no_grad():
        expected = F.softmax(teacher(input_ids=ids, attention_mask=mask).logits, dim=-1)
    apart = F.kl_div(found, expected, reduction="none").sum(-1)
    loss = (apart * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(student))
