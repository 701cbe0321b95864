"""Half of the inputs are replaced by what the model predicts, at all positions; the second call sees no mask."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    with torch.no_grad():
        guesses = model(input_ids=ids, attention_mask=mask).logits.argmax(-1).roll(1, 1)
    mixed = torch.where(torch.arange(16) % 2 == 1, guesses, ids)
    loss = model(input_ids=mixed, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), mixed])
history.append(norms(model))
