"""DistributedDataParallel on two ranks, the model's own loss; losses are averaged over ranks for the log."""

import torch
import torch.distributed as dist
from tiny import batch, llama, norms
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
DEFAULT = True

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(llama())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, labels = batch(10 * dist.get_rank() + step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    history.append([loss.item(), mean.item() / 2])
history.append(norms(model))
dist.destroy_process_group()
