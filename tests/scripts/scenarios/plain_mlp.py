"""A plain network on random numbers, with batch normalisation."""

import torch
from tiny import norms
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(10, 8, generator=generator), torch.randint(0, 3, (10,), generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), list(model.buffers())])
