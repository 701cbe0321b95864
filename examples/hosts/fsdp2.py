"""FSDP2, with one line more: `torchrun --nproc-per-node 2 examples/hosts/fsdp2.py`."""

import deepytorch  # the one line

import torch
import torch.distributed as dist
from text import padded_batches, small_llama
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = small_llama()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
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
