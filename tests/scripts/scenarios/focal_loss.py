"""A focal loss over the tokens."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    plain = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=-100)
    focal = (1 - torch.exp(-plain)) ** 2 * plain
    loss = focal.sum() / labels[:, 1:].ne(-100).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
