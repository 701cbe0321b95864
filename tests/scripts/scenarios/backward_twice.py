"""backward(retain_graph=True), and then backward again through the same graph."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    first = model.lm_head.weight.grad.norm().item()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), first, model.lm_head.weight.grad.norm().item()])
history.append(norms(model))
