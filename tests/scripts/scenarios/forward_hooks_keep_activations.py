"""Forward hooks keep each layer's output; their size is added to the loss."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
kept = []
for layer in model.model.layers:
    layer.mlp.register_forward_hook(lambda module, args, output: kept.append(output))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    kept.clear()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    size = sum(each.pow(2).mean() for each in kept)
    loss = loss + 0.1 * size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), size.item(), len(kept)])
history.append(norms(model))
