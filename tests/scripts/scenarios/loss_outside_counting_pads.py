"""The loss stands outside of the model, and its labels count pads."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
