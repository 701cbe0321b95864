"""Only the logits of tokens are taken, by indexing with the mask."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(ids, attention_mask=mask).logits
    taken = mask[:, 1:].bool()
    loss = F.cross_entropy(logits[:, :-1][taken], ids[:, 1:][taken])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
