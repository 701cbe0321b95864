"""Every step goes through torch.func.functional_call with the model's own parameters."""

import torch
from tiny import batch, llama, norms
from torch.func import functional_call

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    weights = {name: weight * 1.0 for name, weight in model.named_parameters()}
    outputs = functional_call(model, weights, (ids,), {"attention_mask": mask, "labels": labels})
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
