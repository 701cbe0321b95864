"""The training of one model in one way, as one rank: the work behind most benchmarks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.hardware import Hardware
from deepytorch.bench.jobs import TrainingJob as Job
from deepytorch.bench.zoo import build_workload
from deepytorch.comm.group.options import Options
from deepytorch.compiler.budget import BUDGET
from deepytorch.process_facts import peak_memory

_COMPARED = 3  # first steps whose losses are compared
_BATCHES = 4  # that a run goes through again and again


def run(job: Job, turns: Turns) -> dict[str, Any]:
    """Train, and time steps in turns; return their seconds, the first losses, and what ran."""
    if not job.compiles:
        BUDGET.account(-1e9)  # no trace and no compile can be afforded
    ranks = _join(job)
    device = _device(job)
    rank = dist.get_rank() if ranks > 1 else 0
    workload = build_workload(job.model, job.size)
    model: nn.Module = _without_dropout(workload.model).to(device, torch.bfloat16 if job.precision == "bf16" else None)
    batches = [_on(device, batch) for batch in workload.batches(job.rows or workload.rows, rank, _BATCHES)]
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    losses: list[float] = []

    def step(number: int) -> float:
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "amp"):
            loss = model(**batches[number % _BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        if len(losses) < _COMPARED:
            losses.append(float(loss.detach()))
        return seconds

    warm_up = []
    for number in range(job.warm_up):
        turns.say(DOING, f"{job.model}, step {number + 1} of the warm-up")
        warm_up.append(step(number))
    seconds = []
    with _sampled(job, rank) as hardware:
        for number in range(job.steps):
            turns.take()
            seconds.append(step(job.warm_up + number))
            turns.hand_on()
    return {
        "seconds": seconds,
        "warm_up": warm_up,
        "losses": losses,
        "peak_mb": peak_memory() / 2**20,
        "hardware": hardware,
        "rows": len(next(iter(batches[0].values()))),
    }


def _join(job: Job) -> int:
    """Open the process group, as a script does, unless an earlier job has; return the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not dist.is_initialized():
        timeout = timedelta(seconds=job.timeout_s)
        if job.compress is not None:
            dist.init_process_group("deepytorch", timeout=timeout, pg_options=Options(compress=job.compress))  # type: ignore[arg-type]
        else:
            dist.init_process_group("nccl" if job.device == "cuda" else "gloo", timeout=timeout)
    return ranks


def _device(job: Job) -> torch.device:
    if job.device != "cuda":
        return torch.device(job.device)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextlib.contextmanager
def _sampled(job: Job, rank: int) -> Iterator[dict[str, Any]]:
    """Give a dictionary that takes the use of hardware, on the first rank of each host."""
    found: dict[str, Any] = {}
    if not job.hardware or int(os.environ.get("LOCAL_RANK", "0")):
        yield found
        return
    with Hardware() as hardware:
        yield found
    found |= {"seconds": hardware.seconds, **hardware.series}
