"""The script ends with an exception from its forward."""

import torch
from tiny import batch, llama

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    if step == 2:
        labels = labels[:, :-2]
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
