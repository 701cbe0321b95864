"""Training runs with gradients enabled inside of a function under no_grad."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []


@torch.no_grad()
def train():
    for step in range(4):
        ids, mask, _ = batch(step)
        history.append(model(input_ids=ids, attention_mask=mask).logits.std().item())
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        history.append(loss.item())


train()
history.append(norms(model))
