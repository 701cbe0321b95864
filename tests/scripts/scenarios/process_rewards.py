"""A reward at every position, by a token classifier of one label; the loss squares all of them."""

import torch
from tiny import batch, llama, norms
from transformers import LlamaForTokenClassification

torch.manual_seed(0)
model = llama(LlamaForTokenClassification, num_labels=1, classifier_dropout=0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    rewards = model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
    totals = rewards.cumsum(1)[:, -1]
    loss = -torch.nn.functional.logsigmoid(totals[:2] - totals[2:]).mean() + rewards.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), totals.tolist()])
history.append(norms(model))
