"""A layer is dropped after two steps, and the head is replaced."""

import torch
from tiny import VOCAB, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    if step == 2:
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, VOCAB))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
