"""Weights are clipped by .data after each step, and the logits of the step are read after that."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    for weight in model.parameters():
        weight.data.clamp_(-0.4, 0.4)
    history.append([outputs.loss.item(), outputs.logits.std().item()])
history.append(norms(model))
