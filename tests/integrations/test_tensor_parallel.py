"""Models whose weights are divided between ranks run in eager, and the report says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import deepytorch
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard
from deepytorch.parallel_modules import is_divided

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
divided = parallelize_module(net(), mesh["tp"], plan)
both = fully_shard(parallelize_module(net(), mesh["tp"], plan), mesh=mesh["dp"])
sharded = fully_shard(net(), mesh=mesh["dp"])
print([is_divided(each) for each in (net(), divided, both, sharded)])

def losses(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        loss = model(torch.full((4, 8), float(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found

found = losses(divided)
print(found == losses(net()) and found[0] > 0)
print(deepytorch.report())
dist.destroy_process_group()
"""


def test_a_divided_model_is_left_in_eager_and_a_sharded_one_is_not() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second, *report = done.stdout.splitlines()
    assert first == "[False, True, True, False]"
    assert second == "True"
    assert "divided between ranks" in " ".join(" ".join(report).replace("│", " ").split())
