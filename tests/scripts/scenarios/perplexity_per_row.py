"""Perplexity of each row beside the model's own loss."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        per_row = torch.exp(losses.sum(-1) / (labels[:, 1:] != -100).sum(-1))
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), per_row])
history.append(norms(model))
