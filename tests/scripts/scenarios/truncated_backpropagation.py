"""A recurrent language model whose state is handed on, detached."""

import torch
from tiny import VOCAB, batch, norms
from torch import nn

torch.manual_seed(0)
embed, cell, head = nn.Embedding(VOCAB, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, VOCAB)
model = nn.ModuleList([embed, cell, head])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
state = None
history = []
for step in range(4):
    ids, _, _ = batch(step)
    hidden, state = cell(embed(ids), state)
    loss = nn.functional.cross_entropy(head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = state.detach()
    history.append([loss.item(), state.norm()])
history.append(norms(model))
