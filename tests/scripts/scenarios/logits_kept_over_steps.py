"""Logits are kept in a list over all steps, and read in the end."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history, kept = [], []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    kept.append(outputs.logits.detach())
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(outputs.loss.item())
together = torch.cat(kept)
history.append([together.mean().item(), together.std().item(), together.argmax(-1).float().mean().item()])
history.append(norms(model))
