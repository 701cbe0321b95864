"""Rows are packed by the script: one row, positions that begin anew, no mask."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    tokens = mask.bool()
    positions = torch.arange(16).expand(4, 16)[tokens][None]
    labels = labels.index_fill(1, torch.tensor([0]), -100)
    outputs = model(input_ids=ids[tokens][None], position_ids=positions, labels=labels[tokens][None])
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
