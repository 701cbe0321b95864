"""Gradients of each row by vmap over grad of a functional call, clipped one by one, as private training does."""

import torch
import torch.nn.functional as F
from tiny import batch, norms
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(96, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 96)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(weights, ids, mask):
    logits = functional_call(model, weights, (ids[None],))[0]
    losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return (losses * mask[1:]).sum() / mask[1:].sum()


history = []
for step in range(4):
    ids, mask, _ = batch(step)
    plain = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    slopes = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, ids, mask.float())
    sizes = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
    scale = (0.1 / sizes).clamp(max=1.0)
    for name, weight in model.named_parameters():
        weight.grad = torch.einsum("b,b...->...", scale, slopes[name])
    optimizer.step()
    history.append([plain.item(), sizes])
history.append(norms(model))
