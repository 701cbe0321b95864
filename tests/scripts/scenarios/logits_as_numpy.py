"""Logits go to numpy, as metrics outside of torch take them."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.loss.backward()
    array = outputs.logits.detach().cpu().numpy()
    history.append([outputs.loss.item(), float(array.mean()), float(array.std()), float(array[0, -1, 3])])
    optimizer.step()
    optimizer.zero_grad()
history.append(norms(model))
