"""Weights are frozen between the call and the use of its outputs, and thawed before backward."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model, other = llama(), llama(num_hidden_layers=1)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
history = []
for step in range(6 * TIMES):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    model.requires_grad_(False)
    teach = other(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + teach.loss
    if step == 3 * TIMES:
        loss = loss + 0.1 * outputs.logits[mask.bool()].pow(2).mean()
    if step > 3 * TIMES:
        loss = loss + 0.1 * outputs.logits.pow(2).mean()
    model.requires_grad_(True)
    optimizer.zero_grad()
    loss.backward()
    history.append([loss.item(), model.lm_head.weight.grad.norm(), model.model.embed_tokens.weight.grad.norm()])
    optimizer.step()
history.append(norms(model) + norms(other))
