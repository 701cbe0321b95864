"""A reward model takes each row's last token by itself; chosen rows have to be above rejected ones."""

import torch
from tiny import batch, llama, norms
from transformers import LlamaForSequenceClassification

torch.manual_seed(0)
model = llama(LlamaForSequenceClassification, num_labels=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    rewards = model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
    loss = -torch.nn.functional.logsigmoid(rewards[:2] - rewards[2:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), rewards.tolist()])
history.append(norms(model))
