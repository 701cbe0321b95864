"""DistributedDataParallel on two ranks; the loss stands outside and counts pads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import batch, llama, norms
from torch.nn.parallel import DistributedDataParallel

RANKS = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(llama())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, _ = batch(10 * dist.get_rank() + step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
dist.destroy_process_group()
