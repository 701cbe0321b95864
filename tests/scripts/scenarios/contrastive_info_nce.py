"""InfoNCE between queries and passages of other lengths, pooled over their tokens."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms

torch.manual_seed(0)
model = bert()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def embed(ids, mask):
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden = hidden.masked_fill(~mask[..., None].bool(), 0.0)
    return F.normalize(hidden.sum(1) / mask.sum(1)[..., None], dim=-1)


history = []
for step in range(4):
    ids, mask, _ = batch(step, length=10)
    others, others_mask, _ = batch(step + 50, length=18)
    scores = embed(ids, mask) @ embed(others, others_mask).T / 0.2
    loss = F.cross_entropy(scores, torch.arange(4)) + F.cross_entropy(scores.T, torch.arange(4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
