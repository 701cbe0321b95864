"""Pooling outside of the model: the mean over the tokens, as sentence embeddings are made."""

import torch
from tiny import batch, bert, norms

DEFAULT = True

torch.manual_seed(0)
model, head = bert(), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).expand(hidden.size()).float()
    pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
