"""WGAN with a gradient penalty: generator and critic by turns."""

import torch
from tiny import norms
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
first = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
second = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
history = []
for _ in range(4):
    real = torch.randn(6, 8) * 2 + 1
    fake = generator(torch.randn(6, 4))
    share = torch.rand(6, 1)
    between = (share * real + (1 - share) * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
    second.zero_grad()
    loss.backward()
    second.step()
    made = -critic(fake).mean()
    first.zero_grad()
    made.backward()
    first.step()
    history.append([loss.item(), made.item(), penalty.item()])
history.append([norms(generator), norms(critic)])
