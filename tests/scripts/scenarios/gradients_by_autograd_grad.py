"""Gradients come from torch.autograd.grad and are written by hand; input gradients too."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    outputs = model(inputs_embeds=embedded, attention_mask=mask, labels=labels)
    weights = list(model.parameters())
    *slopes, salient = torch.autograd.grad(outputs.loss, [*weights, embedded], allow_unused=True)
    for weight, slope in zip(weights, slopes, strict=True):
        weight.grad = slope
    optimizer.step()
    history.append([outputs.loss.item(), salient.norm(dim=-1)])
history.append(norms(model))
