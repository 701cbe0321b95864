"""A test of all-reduces through shared memory with several ranks on one GPU: are their results right, and do they end?

GPUs joined by NVLink share memory in the same way. One GPU is enough to see whether ranks wait for each other
correctly: torch lets several of them map each other's memory on one device. The test says nothing about the speed of
GPUs with NVLink.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepytorch.bench.benchmark import Place, Setup
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.collectives import join
from deepytorch.bench.launch import WORKER, Ranks, scratch
from deepytorch.comm.algorithms.nvlink import CopyEngines, OneShot, TwoShot

NAMES = (OneShot.name, TwoShot.name, CopyEngines.name)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = (8, 40, 4096, 1 << 18, (1 << 20) + 8)  # in elements: one vector, a few, one tile per program, more
_COUNTS = (4, 28, 4000, 80_000)  # sizes of the many calls: whole vectors of float32
_TOGETHER = 100  # calls between two checks of their results

AllReduce = Callable[[str, Tensor, bool], None]
"""Adds up a tensor in place over all ranks by the algorithm of that name, or averages it."""


class WrongSum(Exception):
    """An all-reduce gave a result that differs from the sum in some bit."""


@dataclass(frozen=True, slots=True)
class OneGpuPlan:
    """The number of calls of changing sizes after the comparisons of every dtype, and the time limit.

    timeout_s: ranks without a message for this long are ended; the first compile is included. `device` "cpu" runs a
    stand-in for the kernels, to test the rest.
    """

    device: str = "cuda"
    calls: int = 10_000
    seconds: float = 60.0
    timeout_s: float = 120.0


Job = OneGpuPlan


@dataclass(frozen=True, slots=True)
class OneGpuFound:
    """The counts of a successful run: comparisons of every dtype, then `calls`, in seconds."""

    ranks: int
    compared: int
    calls: int
    seconds: float


def run_one_gpu(
    plan: OneGpuPlan,
    ranks: int = 4,
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> OneGpuFound:
    """Start `ranks` processes on one device, and let them all-reduce by each algorithm.

    Raises `RankError` if a rank finds a wrong sum, fails otherwise, or hangs; no process is left.
    """
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "DEEPYTORCH_COMPILE": "wait"}
    setup = Setup(name=f"{ranks} ranks on one device", job=plan, imports=True, environment=shared)
    with scratch() as folder:
        processes = Ranks(setup, Place(ranks=ranks), folder, plan.timeout_s, command=worker)
        try:
            processes.give("one_gpu", asdict(plan), notify)
            found = processes.found()[0]
        finally:
            processes.end()
    return OneGpuFound(ranks, int(found["compared"]), int(found["calls"]), float(found["seconds"]))


def run(plan: OneGpuPlan, turns: Turns) -> dict[str, Any]:
    """Compare, then call until there is no time left, as one rank. Raises `WrongSum`."""
    join(plan.timeout_s)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    all_reduce = stand_in if device.type == "cpu" else _on_gpu(device)
    turns.say(DOING, "every dtype")
    compared = compare_sums(all_reduce, rank, ranks, device)
    begin = time.monotonic()

    def go_on(number: int) -> bool:
        turns.say(DOING, f"{number} calls")
        more = torch.tensor(int(time.monotonic() - begin < plan.seconds))
        dist.broadcast(more, 0)
        return bool(more)

    calls = many_calls(all_reduce, rank, ranks, device, plan.calls, go_on)
    dist.barrier()  # no rank frees its memory while another one reads it
    return {"compared": compared, "calls": calls, "seconds": time.monotonic() - begin}


def compare_sums(all_reduce: AllReduce, rank: int, ranks: int, device: torch.device) -> int:
    """Compare every algorithm, dtype and reduction with the float32 sum in the order of the ranks, rounded once.

    Returns the number of comparisons. Raises `WrongSum` if a bit differs.
    """
    kinds = list(product(NAMES, _DTYPES, (False, True), _SIZES))
    for name, dtype, average, size in kinds:
        given = [_drawn(peer, size, dtype) for peer in range(ranks)]
        expected = _reduced(given, average).to(dtype)
        tensor = given[rank].to(device)
        all_reduce(name, tensor, average)
        num_wrong = int((tensor.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
        if num_wrong:
            how = "average" if average else "sum"
            raise WrongSum(f"{name}: {num_wrong} bytes of the {how} of {size} values of {dtype} are wrong")
    return len(kinds)


def many_calls(
    all_reduce: AllReduce,
    rank: int,
    ranks: int,
    device: torch.device,
    calls: int,
    go_on: Callable[[int], bool],
) -> int:
    """Make calls of changing algorithms and sizes back to back, in the same order on all ranks.

    go_on: is told after every 100 calls how many there were, and returns whether to continue, alike on all ranks.
    Returns the number of calls. Raises `WrongSum`.
    """
    drawn = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(0, calls, _TOGETHER):
        last = min(first + _TOGETHER, calls)
        for number in range(first, last):
            value, average = number % 50, number % 2 == 0
            tensor = torch.full((drawn.choice(_COUNTS),), float(rank + value), device=device)
            all_reduce(drawn.choice(NAMES), tensor, average)
            total = ranks * value + ranks * (ranks - 1) / 2
            wrong += (tensor != (total / ranks if average else total)).sum()
        if int(wrong):
            raise WrongSum(f"{int(wrong)} values of calls number {first} to {last - 1} are wrong")
        if not go_on(last):
            return last
    return calls


def _drawn(peer: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * peer + size % 97)).to(dtype)


def _on_gpu(device: torch.device) -> AllReduce:
    """Return an all-reduce by the kernels that GPUs joined by NVLink run."""
    from deepytorch.comm.group.devices.symmetric import SymmetricCollectives

    group = dist.group.WORLD
    assert group is not None
    run = SymmetricCollectives(group.group_name)

    def all_reduce(name: str, tensor: Tensor, average: bool) -> None:
        torch.cuda.current_stream(device).wait_stream(run(name, "all_reduce", tensor, tensor, average))

    return all_reduce


def stand_in(name: str, tensor: Tensor, average: bool) -> None:
    """Compute the result of the kernels, by gloo on the CPU."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    tensor.copy_(_reduced(every, average))


def _reduced(tensors: Sequence[Tensor], average: bool) -> Tensor:
    """Return the float32 sum in the order of the ranks, or the average."""
    total = tensors[0].float()
    for other in tensors[1:]:
        total = total + other.float()
    return total / len(tensors) if average else total
