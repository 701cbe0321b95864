"""A Hessian-vector product is logged each step."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama(attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
weight = model.model.layers[0].mlp.up_proj.weight
direction = torch.randn_like(weight)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    (product,) = torch.autograd.grad((slope * direction).sum(), weight, retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), product.norm().item()])
history.append(norms(model))
