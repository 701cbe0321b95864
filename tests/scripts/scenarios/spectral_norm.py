"""Spectral normalisation, whose power iteration moves buffers in every training call."""

import torch
from tiny import batch, llama, norms
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
model = llama()
spectral_norm(model.lm_head)
spectral_norm(model.model.layers[1].mlp.down_proj)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), list(model.buffers())])
