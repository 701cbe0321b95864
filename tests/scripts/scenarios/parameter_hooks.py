"""Hooks on parameters scale and log gradients."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
history = []
model.lm_head.weight.register_hook(lambda grad: grad * 0.5)
model.model.norm.weight.register_post_accumulate_grad_hook(lambda weight: history.append(weight.grad.norm().item()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
