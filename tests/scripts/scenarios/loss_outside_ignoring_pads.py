"""The loss stands outside of the model; the labels of pads are ignored."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

DEFAULT = True

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
