"""MAML-like: an inner step by functional_call, and the outer loss goes back through it."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms
from torch.func import functional_call

torch.manual_seed(0)
model = llama(attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(weights, step):
    ids, mask, _ = batch(step)
    logits = functional_call(model, weights, kwargs={"input_ids": ids, "attention_mask": mask}).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


history = []
for step in range(3):
    weights = dict(model.named_parameters())
    inner = loss_of(weights, 2 * step)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
    outer = loss_of(adapted, 2 * step + 1)
    optimizer.zero_grad()
    outer.backward()
    optimizer.step()
    history.append([inner.item(), outer.item()])
history.append(norms(model))
