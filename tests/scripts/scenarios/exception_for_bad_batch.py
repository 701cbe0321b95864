"""A batch with a token outside of the vocabulary raises; the script goes on with the next one."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    if step == 1:
        ids[0, 0] = 1000
    try:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    except IndexError:
        history.append(-1.0)
        continue
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
