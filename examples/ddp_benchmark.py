"""Data-parallel training in eager DDP and in deepytorch, one after the other, on a model of your own.

    torchrun --nproc-per-node 2 examples/ddp_benchmark.py

Put your model and batches in place of `build_model` and `batch_of`. On GPUs nothing changes but `DEVICE`. Prints the
percentiles of a step in the format of PyTorch's DDP benchmark, and whether both arms ended with the same weights.
`deepytorch bench ddp` measures more arms, on known models, in turns.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch

DEVICE = "cpu"
BATCH_SIZE, WARM_UP, STEPS = 32, 5, 20


def build_model() -> nn.Module:
    """Return a network whose gradients take about as long to send as to compute."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).to(DEVICE)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images = torch.randn(BATCH_SIZE, 1024, generator=generator)
    return images.to(DEVICE), torch.randint(0, 10, (BATCH_SIZE,), generator=generator).to(DEVICE)


def train(name: str, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Train for some steps, print their times, and return the weights."""
    model = DistributedDataParallel(build_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    seconds = []
    for step in range(WARM_UP + STEPS):
        inputs, labels = batch_of(step)
        dist.barrier()
        begin = time.perf_counter()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    cuts = statistics.quantiles(seconds[WARM_UP:], n=100, method="inclusive")
    parts = [f"p{part}: {cuts[part - 1]:7.4f}s {BATCH_SIZE / cuts[part - 1]:7.0f}/s" for part in (50, 75, 90, 95)]
    if dist.get_rank() == 0:
        print(f"{name:>10} {dist.get_world_size()} ranks:  " + "  ".join(parts), flush=True)
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    """Compare."""
    if "RANK" not in os.environ:
        raise SystemExit("Start with: torchrun --nproc-per-node 2 examples/ddp_benchmark.py")
    dist.init_process_group("gloo")
    with deepytorch.paused():  # the import compiles whatever trains, but not in here
        stock = train("ddp", None)
    ours = train("deepytorch", dist.new_group(backend="deepytorch"))
    worst = max(float((one - other).norm() / one.norm()) for one, other in zip(stock, ours, strict=True))
    if dist.get_rank() == 0:
        print(f"largest relative difference of a weight: {worst:.1e}")
        print(deepytorch.report())
    dist.destroy_process_group()
    if worst > 1e-5:
        raise SystemExit("the weights differ")


if __name__ == "__main__":
    main()
