"""The script compiles its own function of forward and loss."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms

torch.manual_seed(0)
model, head = bert(), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)


@torch.compile(backend="aot_eager")
def loss_of(ids, mask):
    return F.cross_entropy(head(model(ids, mask).last_hidden_state.mean(1)), ids[:, 1] % 2)


history = []
for step in range(3):
    ids, mask, _ = batch(step)
    loss = loss_of(ids, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
