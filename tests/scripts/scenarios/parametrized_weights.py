"""A parametrization keeps a weight symmetric."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms
from torch.nn.utils import parametrize


class Symmetric(torch.nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


torch.manual_seed(0)
model = llama()
parametrize.register_parametrization(model.model.layers[0].self_attn.o_proj, "weight", Symmetric())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
