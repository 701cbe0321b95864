"""Gradients of each row of an encoder by vmap over grad, beside a training step of the usual kind."""

import torch
import torch.nn.functional as F
from tiny import batch, norms
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(96, 32)
        self.attend = torch.nn.Linear(32, 96)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, ids, mask):
        q, k, v = self.attend(self.embed(ids)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / 6).masked_fill(mask[:, None] == 0, -1e9)
        return self.head(scores.softmax(-1) @ v)


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(weights, ids, mask):
    logits = functional_call(model, weights, (ids[None], mask[None]))
    return F.cross_entropy(logits[0], ids % 2)


history = []
for step in range(4):
    ids, mask, _ = batch(step)
    loss = F.cross_entropy(model(ids, mask).flatten(0, 1), ids.flatten() % 2)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    slopes = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, ids, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), [slope.flatten(1).norm(dim=1) for slope in slopes.values()]])
history.append(norms(model))
