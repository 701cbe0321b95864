"""DistributedDataParallel on two ranks: only the first one reads all logits, for a metric."""

import torch
import torch.distributed as dist
from tiny import batch, llama, norms
from torch.nn.parallel import DistributedDataParallel

RANKS = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(llama())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(10 * dist.get_rank() + step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append(outputs.loss.item())
    if dist.get_rank() == 0:
        history.append([outputs.logits.std().item(), outputs.logits.argmax(-1).float().mean().item()])
history.append(norms(model))
dist.destroy_process_group()
