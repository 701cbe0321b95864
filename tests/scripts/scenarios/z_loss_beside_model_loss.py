"""A z-loss on all logits is added to the model's own loss."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    z_loss = 1e-2 * torch.logsumexp(outputs.logits, dim=-1).pow(2).mean()
    loss = outputs.loss + z_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), z_loss.item()])
history.append(norms(model))
