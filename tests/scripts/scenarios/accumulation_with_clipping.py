"""Gradients of several batches are added up, clipped by their norm, and the norm is logged."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

DEFAULT = True

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
history = []
for step in range(3):
    for part in range(2):
        ids, mask, labels = batch(2 * step + part)
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 80
        loss.backward()
        history.append(loss.item())
    history.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=False)
history.append(norms(model))
