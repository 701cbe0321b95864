"""Several ranks that share this GPU: all-reduces through each other's memory, DDP, and memory registered with NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from deepytorch.bench import ddp_of_one_gpu, ranks_of_one_gpu
from deepytorch.bench.launch import RankError
from deepytorch.bench.training_step import DTYPES
from deepytorch.gpu_check.nearness import within
from deepytorch.gpu_check.outcome import Check, Failed, Found, Skipped

_MANY_S = 240.0  # the deadline of a check with many compiles, or many ranks


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for backend, dtype in (("gloo", "fp32"), ("gloo", "bf16"), ("deepytorch", "fp32"), ("nccl", "fp32")):
        run = partial(ddp_is_right, device, backend, dtype)
        group = f"DDP of two ranks: {backend}"
        yield Check(group, f"a packed step, {dtype}", run, deadline_s=_MANY_S, expected_s=30.0)
    all_run = partial(all_reduces, device)
    name = "all-reduces of 4 ranks"
    yield Check("ranks of one GPU", name, all_run, is_timed=True, deadline_s=_MANY_S, expected_s=30.0)
    yield Check("registered memory", "NCCL with one rank", partial(registered_memory, device))


def ddp_is_right(device: torch.device, backend: str, dtype: str) -> str:
    """Compare packed steps of two ranks, by the import alone, with those of one process in eager."""
    if backend == "nccl" and device.type != "cuda":
        raise Skipped("no CUDA device")
    try:
        found = ddp_of_one_gpu.run_ddp(ddp_of_one_gpu.DdpPlan(str(device), backend, dtype))
    except RankError as error:
        if backend == "nccl" and ("Duplicate GPU" in str(error) or "invalid usage" in str(error)):
            raise Skipped("NCCL takes one rank on each GPU") from None
        raise Failed(str(error)) from None
    both = list(zip(ddp_of_one_gpu.NAMES, found.off, found.eager_off, found.norm, strict=True))
    worst = max(within(*each, DTYPES[dtype]) for each in both)
    if not found.packed:
        raise Failed(f"{found.padded} steps ran padded, and none packed")
    return f"off by {worst:.1e} at most, {found.packed} steps packed, {found.padded} padded"


def all_reduces(device: torch.device) -> Found:
    """Check all-reduces of ranks that share this GPU and map each other's memory: every dtype, then back to back.

    Their time does not say what they take between GPUs: ranks of one GPU run one after the other.
    """
    fewer = {"calls": 200, "seconds": 2.0} if device.type == "cpu" else {"seconds": 10.0}
    try:
        found = ranks_of_one_gpu.run_one_gpu(ranks_of_one_gpu.OneGpuPlan(str(device), **fewer))  # type: ignore[arg-type]
    except RankError as error:
        raise Failed(str(error)) from None
    us = 1e6 * found.seconds / found.calls
    said = f"{found.compared} kinds and {found.calls} calls have the right bits, {us:,.0f} us a call on one GPU"
    return Found(said, {"call_us": us, "calls": float(found.calls)})


def registered_memory(device: torch.device) -> str:
    """Check memory registered with NCCL: made, summed in, dropped while a part of it is held, and made anew."""
    import torch.distributed as dist

    from deepytorch.comm.group.devices.registered import RegisteredMemory

    if device.type != "cuda" or not dist.is_nccl_available():
        raise Skipped("no CUDA device, or a torch without NCCL")
    place = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    nccl: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    if not nccl.supports_tensor_alloc(place):
        raise Skipped("NCCL offers none on this device")
    memory = RegisteredMemory(nccl, place)
    memory.connect()
    held = []
    for size in (5, 12 << 20, 40 << 20, 5, 12 << 20):
        made = memory.allocate(size)
        nccl.allreduce([made.fill_(3)], dist.AllreduceOptions()).wait()
        if not bool((made == 3).all()):
            raise Failed(f"the sum of one rank's {size} bytes is not what they were")
        held.append(made[: size // 2])
        del made
    if not all(bool((part == 3).all()) for part in held):
        raise Failed("memory that was still held has changed")
    return f"{len(held)} pieces"
