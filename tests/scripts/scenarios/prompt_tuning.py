"""Learned vectors stand before each row's embeddings, and the mask is made longer."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama().requires_grad_(False)
prompt = torch.nn.Parameter(torch.randn(3, 32))
optimizer = torch.optim.SGD([prompt], lr=1.0)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    embedded = torch.cat([prompt.expand(4, -1, -1), model.get_input_embeddings()(ids)], dim=1)
    mask = torch.cat([torch.ones(4, 3, dtype=torch.long), mask], dim=1)
    logits = model(inputs_embeds=embedded, attention_mask=mask).logits[:, 2:-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), prompt.detach().norm()])
