"""Pooling outside of the model: weights over positions are learned; without a mask at first, then with one."""

import torch
from tiny import batch, bert, norms

torch.manual_seed(0)
model, score, head = bert(), torch.nn.Linear(32, 1), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *score.parameters(), *head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    scores = score(hidden).squeeze(-1)
    if step >= 2:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    pooled = torch.einsum("bs,bsh->bh", scores.softmax(-1), hidden)
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
