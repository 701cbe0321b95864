"""A penalty on the gradient of the model's own loss with respect to its weights."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama(attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3 * TIMES):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss = loss + 0.01 * sum(each.pow(2).sum() for each in slopes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
