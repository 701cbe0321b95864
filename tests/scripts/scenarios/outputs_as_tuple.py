"""Outputs are read by index, by key and as a tuple."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    if step < 2:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss, logits = outputs[0], outputs["logits"] if step else outputs.to_tuple()[1]
    else:
        loss, logits = model(ids, mask, labels=labels, return_dict=False, use_cache=False)
    loss = loss + logits.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), logits.mean().item(), *logits.shape])
history.append(norms(model))
