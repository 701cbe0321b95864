"""torch.utils.checkpoint around the whole model, without reentrance."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = checkpoint(lambda a, b: model(input_ids=a, attention_mask=b).logits, ids, mask, use_reentrant=False)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
