"""Every batch has another number of rows and another length; the last one has a single row."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step, (rows, length) in enumerate([(4, 16), (3, 12), (5, 19), (1, 9)]):
    ids, mask, labels = batch(step, rows=rows, length=length)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + F.softplus(outputs.logits).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
