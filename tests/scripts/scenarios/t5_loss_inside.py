"""T5 with its own loss, decoder pads ignored, and its logits read at all positions after the second step."""

import torch
from tiny import batch, norms, t5

torch.manual_seed(0)
model = t5()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    _, _, labels = batch(step + 50, length=10)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), outputs.logits.std().item() if step > 1 else 0.0])
history.append(norms(model))
