"""Body and head have optimizers of their own, which step by turns."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
body = torch.optim.AdamW(model.model.parameters(), lr=1e-2)
head = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    body.zero_grad()
    head.zero_grad()
    loss.backward()
    (body if step % 2 else head).step()
    history.append(loss.item())
history.append(norms(model))
