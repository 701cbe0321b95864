"""A forward that draws noise by name, compiled by Inductor: it draws what eager draws."""

import torch
from torch import nn

LOWERING = "inductor"
torch.manual_seed(0)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x + 0.1 * torch.randn_like(x)))
        return self.outer(hidden * torch.bernoulli(torch.full_like(hidden, 0.9)))


model = Noisy().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for _ in range(4):
    loss = model(torch.randn(6, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append([loss.item(), torch.rand(()).item()])
