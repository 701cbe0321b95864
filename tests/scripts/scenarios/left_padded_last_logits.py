"""Rows are padded on the left, and the last position's logits are trained."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step, side="left")
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -1]
    loss = F.cross_entropy(logits, ids[:, 5])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
