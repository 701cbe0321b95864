"""The loss counts a slice of positions that begins among tokens and ends among pads."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, 4:12].contiguous()
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids[:, 5:13].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
