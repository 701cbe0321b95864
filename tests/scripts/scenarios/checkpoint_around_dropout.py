"""A checkpoint around a model with dropout, of either kind: it is computed again as it was computed first.

The loss is linear in the weights of the last layer, so their gradients tell which forward was differentiated.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DEFAULT = True
LOWERING = "inductor"  # whose dropout is not eager's
history = []
for reentrant in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4)).train()
    optimizer, direction, last = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4), model[3]
    for _ in range(4):
        x = torch.randn(6, 8, requires_grad=True)
        loss = (checkpoint(model, x, use_reentrant=reentrant) * direction).sum()
        loss.backward()
        by_gradient = (last.weight * last.weight.grad).sum() + (last.bias * last.bias.grad).sum()
        history.append(float((by_gradient - loss).abs() < 1e-4))
        optimizer.step()
        optimizer.zero_grad()
