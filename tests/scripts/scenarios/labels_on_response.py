"""The model's own loss, with labels on the second half of each row."""

import torch
from tiny import batch, llama, norms

EXPECT = "packed"

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    prompts = mask.sum(1, keepdim=True) // 2
    labels = labels.masked_fill(torch.arange(16) < prompts, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
