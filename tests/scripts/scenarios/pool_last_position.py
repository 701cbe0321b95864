"""Pooling outside of the model: the last position, which is a pad in most rows."""

import torch
from tiny import batch, llama, norms
from transformers import LlamaModel

torch.manual_seed(0)
model, head = llama(LlamaModel), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    pooled = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
