"""An exponential moving average teaches the model it is made of (mean teacher), on all positions."""

import copy

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        expected = average(input_ids=ids, attention_mask=mask).logits
    loss = outputs.loss + F.mse_loss(outputs.logits, expected)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
    history.append(loss.item())
history.append([norms(model), norms(average)])
