"""Weights are kept when the loss was best, and loaded again in the end."""

import copy

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
best, kept = float("inf"), None
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        judged = model(input_ids=ids, attention_mask=mask).logits.exp().mean().log().item()
    model.train()
    if judged < best:
        best, kept = judged, copy.deepcopy(model.state_dict())
    history.append([outputs.loss.item(), judged])
model.load_state_dict(kept)
history.append(norms(model))
