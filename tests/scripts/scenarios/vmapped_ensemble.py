"""An ensemble of small networks, trained through vmap over stacked weights."""

import copy

import torch
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(0)
members = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)) for _ in range(3)]
weights, buffers = stack_module_state(members)
skeleton = copy.deepcopy(members[0]).to("meta")
optimizer = torch.optim.Adam(list(weights.values()), lr=1e-2)
history = []
for step in range(4):
    inputs = torch.randn(10, 8, generator=torch.Generator().manual_seed(step))
    answers = vmap(lambda w, b: functional_call(skeleton, (w, b), (inputs,)), (0, 0))(weights, buffers)  # noqa: B023
    loss = (answers - inputs[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([weight.norm() for weight in weights.values()])
