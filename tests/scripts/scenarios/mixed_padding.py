"""Some rows of a batch are padded on the left, the others on the right; the loss counts all positions."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step, side="mixed" if step % 2 else "right")
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + F.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
