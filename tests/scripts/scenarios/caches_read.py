"""The keys and values of the last layer are regularised."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=True)
    last = outputs.past_key_values.layers[-1]
    loss = outputs.loss + 0.1 * (last.keys.pow(2).mean() + last.values.pow(2).mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), last.keys.detach().norm()])
history.append(norms(model))
