"""Hooks put a layer's weights in place before its forward and take them away after it, as offloading does."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elsewhere = {}


def fetch(module, args):
    for name, weight in module.named_parameters():
        if name in elsewhere:
            weight.data = elsewhere.pop(name)


def put_away(module, args, output):
    for name, weight in module.named_parameters():
        elsewhere[name] = weight.data.clone()


model.lm_head.register_forward_pre_hook(fetch)
model.lm_head.register_forward_hook(put_away)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    elsewhere.clear()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
