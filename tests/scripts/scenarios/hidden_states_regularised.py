"""All hidden states are asked for and regularised, beside the model's own loss."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    size = sum(each.pow(2).mean() for each in outputs.hidden_states)
    loss = outputs.loss + 0.01 * size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), size.item()])
history.append(norms(model))
