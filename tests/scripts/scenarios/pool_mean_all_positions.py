"""Pooling outside of the model: the mean over all positions, pads among them."""

import torch
from tiny import batch, bert, norms

DEFAULT = True

torch.manual_seed(0)
model, head = bert(), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    pooled = model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
