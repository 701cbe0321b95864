"""A learned mixture of all layers, averaged over the tokens."""

import torch
from tiny import batch, bert, norms

torch.manual_seed(0)
model, mixture, head = bert(), torch.nn.Parameter(torch.zeros(3)), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), mixture, *head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    layers = torch.stack(model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states)
    hidden = (mixture.softmax(0)[:, None, None, None] * layers).sum(0)
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    loss = torch.nn.functional.cross_entropy(head(pooled), ids[:, 1] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), mixture.tolist()])
