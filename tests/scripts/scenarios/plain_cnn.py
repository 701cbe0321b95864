"""A plain convolutional network, whose second batch is smaller."""

import torch
from tiny import norms
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
history = []
for step, rows in enumerate([6, 4, 6]):
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), (logits.argmax(-1) == labels).float().mean()])
history.append([norms(model), [buffer.float() for buffer in model.buffers()]])
