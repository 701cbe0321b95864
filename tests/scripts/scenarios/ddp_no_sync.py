"""DistributedDataParallel on two ranks: accumulation with no_sync, and a loss outside that counts pads."""

import contextlib

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
for step in range(4):
    ids, mask, _ = batch(10 * dist.get_rank() + step)
    with contextlib.nullcontext() if step % 2 else model.no_sync():
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 2
        loss.backward()
    if step % 2:
        history.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    history.append(loss.item())
history.append(norms(model))
dist.destroy_process_group()
