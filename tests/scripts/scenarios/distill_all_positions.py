"""Distillation over all positions, pads among them, from a frozen teacher that the student starts equal to."""

import copy

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
student = llama()
teacher = copy.deepcopy(student).eval().requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = student(input_ids=ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        expected = teacher(input_ids=ids, attention_mask=mask).logits
    apart = F.kl_div(
        F.log_softmax(outputs.logits / 2, -1), F.log_softmax(expected / 2, -1), reduction="batchmean", log_target=True
    )
    loss = outputs.loss + apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([apart.item(), loss.item()])
history.append(norms(student))
