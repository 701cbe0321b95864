"""A gradient reversal layer on the logits, from the first step on."""

import torch
from tiny import batch, llama, norms


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return -g


torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    optimizer.zero_grad()
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + Reverse.apply(outputs.logits)[mask.bool()].pow(2).mean()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), model.lm_head.weight.grad.norm()])
history.append(norms(model))
