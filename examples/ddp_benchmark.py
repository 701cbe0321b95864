"""PyTorch's data-parallel benchmark with deepytorch: one line more than native DDP.

    torchrun --nproc-per-node 2 examples/ddp_benchmark.py --model resnet50 --precision amp
    DEEPYTORCH=off torchrun --nproc-per-node 2 examples/ddp_benchmark.py --model resnet50 --precision amp

The second line is native DDP. Trains on one rank, on the ranks of one host, and on all hosts that torchrun has, and
prints the percentiles of a step as PyTorch's benchmark does: seconds, and examples a second of one rank.
`deepytorch bench acspeed` runs the same for all of its models, native and not in turns, and makes the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepytorch  # the one line
from deepytorch.bench.acspeed import ROWS
from deepytorch.bench.zoo import SIZES, build_workload

PERCENTILES = (50, 75, 90, 95)


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="PyTorch's data-parallel benchmark.")
    parser.add_argument("--model", choices=sorted(ROWS), default="resnet50")
    parser.add_argument("--size", choices=SIZES, default="full", help="full: as published; cpu: a quarter of the width")
    parser.add_argument("--precision", choices=("fp32", "amp"), default="amp")
    parser.add_argument("--batch-size", type=int, default=0, help="of each rank; default: that of the model's table")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def train(given: argparse.Namespace, device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Train and return the seconds of each step on this rank. group: None trains without DDP."""
    workload = build_workload(given.model, given.size)
    rows = given.batch_size or ROWS[given.model][given.size != "full"]
    batches = workload.batches(rows, dist.get_rank(), 4)
    model: torch.nn.Module = workload.model.to(device)
    if group is not None:
        model = DistributedDataParallel(
            model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=25
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    seconds = []
    for step in range(given.warm_up + given.steps):
        batch = {name: value.to(device) for name, value in batches[step % len(batches)].items()}
        if group is not None:
            dist.barrier(group)
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=given.precision == "amp"):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return seconds[given.warm_up :]


def main() -> None:
    """Measure on more and more ranks."""
    given = arguments()
    if "RANK" not in os.environ:
        raise SystemExit("Start with: torchrun --nproc-per-node 2 examples/ddp_benchmark.py")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, per_host = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = dist.get_world_size() // per_host
    rows = given.batch_size or ROWS[given.model][given.size != "full"]
    for ranks in dict.fromkeys((0, 1, per_host, per_host * hosts)):
        group = dist.new_group(range(max(ranks, 1)))  # every rank takes part in making a group
        if rank < max(ranks, 1):
            assert isinstance(group, dist.ProcessGroup)
            seconds = train(given, device, group if ranks else None)
            pooled: list[list[float]] = [[]] * max(ranks, 1)
            dist.all_gather_object(pooled, seconds, group=group)
            everyones = [each for found in pooled for each in found]
            cuts = statistics.quantiles(everyones, n=100, method="inclusive")
            parts = [f"p{part}: {cuts[part - 1]:7.3f}s {rows / cuts[part - 1]:6.1f}/s" for part in PERCENTILES]
            shape = f"{-(-ranks // per_host)}M/{min(ranks, per_host)}R" if ranks else "no ddp"
            if rank == 0:
                print(f"{max(ranks, 1):4} ranks -- {shape:>9}:  " + "  ".join(parts), flush=True)
        dist.barrier()
    if rank == 0:
        print(deepytorch.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
