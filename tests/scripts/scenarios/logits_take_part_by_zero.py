"""All outputs take part in the loss, multiplied by zero, so that every parameter has a gradient."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    loss = outputs.loss + 0.0 * outputs.logits.sum() + 0.0 * outputs.hidden_states[-1].sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
