"""A hook on the logits of a model that computes its own loss: it sees no gradient but that of what is added outside."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.logits.register_hook(lambda grad: history.append(grad.norm().item()))
    loss = outputs.loss + 0.1 * outputs.logits.tanh().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
