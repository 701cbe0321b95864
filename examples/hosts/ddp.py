"""DistributedDataParallel, with one line more: `torchrun --nproc-per-node 2 examples/hosts/ddp.py`."""

import deepytorch  # the one line

import torch
import torch.distributed as dist
from text import padded_batches, small_llama
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(small_llama())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(padded_batches(20, dist.get_rank())):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if dist.get_rank() == 0:
    print(deepytorch.report())
dist.destroy_process_group()
