"""The embeddings and the first layer are frozen after two steps."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4 * TIMES):
    if step == 2 * TIMES:
        model.get_input_embeddings().requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), sum(weight.grad is not None for weight in model.parameters())])
history.append(norms(model))
