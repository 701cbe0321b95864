"""A hook on the whole model keeps its outputs; the loss is made from what it kept."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
kept = {}
model.register_forward_hook(lambda module, args, output: kept.update(logits=output.logits))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss = loss + 0.1 * kept["logits"].pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
