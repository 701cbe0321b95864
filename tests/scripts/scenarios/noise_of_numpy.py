"""A forward that draws from NumPy and from `random`: their own generators are drawn from, and torch's is not."""

import random

import numpy as np
import torch
from torch import nn

DEFAULT = True
generator = np.random.RandomState(1)


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.outer, self.draw = nn.Linear(8, 8), nn.Linear(8, 4), draw

    def forward(self, x):
        return self.outer(self.draw(torch.tanh(self.inner(x))))


class MasksSpans(Noisy):
    """As Wav2Vec2's: the kept numbers are chosen by `np.random.choice`, how many by `np.random.rand`."""

    def forward(self, x):
        count = int(4 + np.random.rand(1).item() * 3)
        kept = np.zeros(8, dtype=bool)
        kept[np.random.choice(np.arange(8), count, replace=False)] = True
        return self.outer(torch.tanh(self.inner(x)) * torch.tensor(kept))


DRAWS = [
    lambda hidden: hidden * np.random.rand(1).item(),
    lambda hidden: hidden * torch.tensor(np.random.uniform(0.5, 1.5, size=8), dtype=torch.float32),
    lambda hidden: hidden * torch.from_numpy(np.random.randint(0, 3, size=(6, 8))),
    lambda hidden: hidden + np.random.normal(),
    lambda hidden: hidden * generator.rand(),
    lambda hidden: hidden * random.uniform(0.5, 1.5),
]
history = []
for number, draw in enumerate([*DRAWS, None]):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
    kind = type(f"Noisy{number}", (Noisy if draw else MasksSpans,), {})
    model = kind(draw).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item(), torch.rand(()).item(), float(np.random.rand()), random.random()])
