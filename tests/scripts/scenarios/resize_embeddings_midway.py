"""The vocabulary grows after two steps, and a new optimizer is made."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    if step == 2:
        outputs = loss = None  # a graph that is still there would keep the old shape
        model.resize_token_embeddings(104, mean_resizing=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if step >= 2:
        ids[:, 1], labels[:, 1] = 100, 100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), outputs.logits.shape[-1]])
history.append(norms(model))
