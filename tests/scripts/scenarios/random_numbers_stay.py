"""Random numbers that the script draws between steps, and the state of the generator, stay what they were."""

import random

import torch
from tiny import batch, llama, norms

random.seed(0)
torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    noise = torch.randn_like(outputs.logits)
    loss = outputs.loss + 0.1 * (outputs.logits + noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), torch.rand(3), random.random(), torch.get_rng_state().double().mean()])
history.append(norms(model))
