"""The model is copied after two steps; both are trained on, with different batches."""

import copy

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pairs = [(model, optimizer)]
history = []
for step in range(4):
    if step == 2:
        other = copy.deepcopy(model)
        pairs.append((other, torch.optim.SGD(other.parameters(), lr=0.05)))
    for place, (each, its_optimizer) in enumerate(pairs):
        ids, mask, labels = batch(step + 10 * place)
        outputs = each(input_ids=ids, attention_mask=mask, labels=labels)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        its_optimizer.zero_grad()
        loss.backward()
        its_optimizer.step()
        history.append(loss.item())
history.append([norms(model), norms(other)])
