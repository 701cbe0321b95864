"""Directional derivatives by torch.func.jvp, beside training of the same model."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms
from torch.func import functional_call, jvp

torch.manual_seed(0)
model = llama(attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
direction = {name: torch.ones_like(weight) for name, weight in model.named_parameters()}
history = []
for step in range(3):
    ids, mask, labels = batch(step)

    def loss_of(weights):
        logits = functional_call(model, weights, (), {"input_ids": ids, "attention_mask": mask}).logits  # noqa: B023
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())  # noqa: B023

    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    value, slope = jvp(loss_of, (weights,), (direction,))
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), value.item(), slope.item()])
history.append(norms(model))
