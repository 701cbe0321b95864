"""Two losses from one forward, each with a backward of its own."""

import torch
import torch.nn.functional as F
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4 * TIMES):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    one = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    two = 0.1 * logits.pow(2).mean()
    optimizer.zero_grad()
    one.backward(retain_graph=True)
    two.backward()
    optimizer.step()
    history.append([one.item(), two.item()])
history.append(norms(model))
