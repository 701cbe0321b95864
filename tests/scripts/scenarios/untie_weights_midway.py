"""Head and embeddings are one, and come apart after two steps."""

import torch
from tiny import batch, gpt2, norms

torch.manual_seed(0)
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    if step == 2:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), len(list(model.parameters()))])
