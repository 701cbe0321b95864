"""The model's own loss goes backward first, then one that was made from its logits."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward(retain_graph=True)
    extra = 0.1 * outputs.logits.logsumexp(-1).square().mean()
    extra.backward()
    optimizer.step()
    history.append([outputs.loss.item(), extra.item()])
history.append(norms(model))
