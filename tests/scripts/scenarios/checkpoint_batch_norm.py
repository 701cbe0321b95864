"""A checkpoint around batch normalisation, whose statistics eager computes once more in the backward."""

import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.entry, self.use_reentrant = torch.nn.Linear(6, 8), use_reentrant
        self.body = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    def forward(self, rows):
        return checkpoint(self.body, self.entry(rows), use_reentrant=self.use_reentrant).sum(1)


torch.manual_seed(0)
history = []
for use_reentrant in (False, True):
    model = Model(use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        loss = model(torch.randn(16, 6) + 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        history += [float(each.double().sum()) for each in model.buffers()]
