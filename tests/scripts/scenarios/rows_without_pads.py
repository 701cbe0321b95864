"""Every row is full, but there is a mask."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, _, _ = batch(step)
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    loss = outputs.loss + 0.1 * outputs.logits.logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
