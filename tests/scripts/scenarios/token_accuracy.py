"""The accuracy over tokens beside the model's own loss, as trainers log it."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step % 2)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    found = outputs.logits[:, :-1].argmax(-1)
    targets = labels[:, 1:]
    right = (found == targets) & (targets != -100)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), right.sum() / (targets != -100).sum()])
history.append(norms(model))
