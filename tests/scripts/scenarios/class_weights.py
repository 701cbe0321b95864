"""Classes have weights; pads are a class of their own with a weight of zero."""

import torch
from tiny import VOCAB, batch, llama, norms

torch.manual_seed(0)
model = llama()
weights = torch.linspace(0.5, 1.5, VOCAB)
weights[0] = 0.0
criterion = torch.nn.CrossEntropyLoss(weight=weights)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = criterion(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
