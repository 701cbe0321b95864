"""Logits at pads are filled with a constant, out of place."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits = logits.masked_fill(~mask.bool().unsqueeze(-1), -1.0)
    logits = torch.where(ids.unsqueeze(-1) == 7, torch.zeros_like(logits), logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.1 * logits.mean().square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
