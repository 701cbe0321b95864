"""The older spectral normalisation, made of a forward pre-hook."""

import torch
from tiny import batch, bert, norms

torch.manual_seed(0)
model, head = bert(), torch.nn.utils.spectral_norm(torch.nn.Linear(32, 2))
torch.nn.utils.spectral_norm(model.encoder.layer[0].output.dense)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    pooled = model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1)
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), norms(head)])
