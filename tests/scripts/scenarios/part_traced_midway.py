"""A part of the model is replaced by its torch.jit trace after two steps."""

import warnings

import torch
from tiny import batch, llama, norms

warnings.simplefilter("ignore")
torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    if step == 2:
        model.model.layers[0].mlp = torch.jit.trace(model.model.layers[0].mlp, torch.randn(4, 16, 32))
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
