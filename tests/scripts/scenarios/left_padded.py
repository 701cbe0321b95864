"""Rows are padded on the left, with positions to match; the loss is the model's own."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step, side="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    loss = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
