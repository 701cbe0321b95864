"""Deep mutual learning: two models of different kinds, one loss for both."""

import torch
import torch.nn.functional as F
from tiny import batch, gpt2, llama, norms

torch.manual_seed(0)
one, two = llama(), gpt2()
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    first = one(input_ids=ids, attention_mask=mask, labels=labels)
    second = two(input_ids=ids, attention_mask=mask, labels=labels)
    apart = F.mse_loss(first.logits.softmax(-1), second.logits.softmax(-1))
    loss = first.loss + second.loss + 10 * apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), apart.item()])
history.append([norms(one), norms(two)])
