"""A custom autograd function, and a number of the model's that changes in each step."""

import torch
from torch import nn


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Adversarial(nn.Module):
    factor = 0.0

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(256, 4)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(Reversed.apply(hidden, self.factor)) + hidden[:, :4]


torch.manual_seed(0)
model = Adversarial()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    model.factor = step / 1e6
    optimizer.zero_grad()
    model(torch.ones(256, 256) * (step % 5)).pow(2).mean().backward()
    optimizer.step()
