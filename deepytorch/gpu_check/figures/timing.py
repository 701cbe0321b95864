"""Times on a device, and the least time that its data sheet allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepytorch.bench.memory import is_out_of_memory
from deepytorch.bench.roofline import GPUS, Gpu, Work
from deepytorch.gpu_check.outcome import Found, Skipped
from deepytorch.gpu_check.records import short_name

OURS = "deepytorch"
_WARM_UP, _ROUNDS = 3, 10


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the median over some calls of the milliseconds from one's begin to its end on the device."""
    for _ in range(_WARM_UP):
        call()
    return statistics.median(_milliseconds(call, device) for _ in range(_ROUNDS))


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the data sheet of a device, of those that `bench roofline` has."""
    name = short_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""
    return next((gpu for gpu in GPUS if gpu.name == name), None)


def timed(
    device: torch.device,
    ms: float,
    *,
    flops: float = 0.0,
    num_bytes: float = 0.0,
    limit_s: Callable[[Gpu], float] | None = None,
    **figures: float,
) -> Found:
    """Return a time with the rates that belong to it, and with the least time that it could be.

    flops, num_bytes: of the whole; the limit is the longer of both. limit_s: the limit itself, of sums of kernels.
    """
    rates = {"tflop_per_s": flops / ms / 1e9} if flops else {"gbyte_per_s": num_bytes / ms / 1e6} if num_bytes else {}
    found = {"step_ms": ms, **rates, **figures}
    gpu = gpu_of(device)
    if gpu is not None:
        limit_ms = 1e3 * (limit_s or Work("", flops, num_bytes, 1).seconds)(gpu)
        if limit_ms:
            found |= {"limit_ms": limit_ms, "limit_efficiency": limit_ms / ms}
    return Found(in_words(found), found)


def in_words(figures: dict[str, float]) -> str:
    """Return figures for people to read: each with its unit."""
    return ", ".join(_word(name, value) for name, value in figures.items())


def _word(name: str, value: float) -> str:
    if name.endswith("efficiency"):
        return f"{100 * value:.0f} % of the limit" if value >= 0.01 else f"{100 * value:.1g} % of the limit"
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if name == "step_ms":
        return f"{number} ms"
    for end, unit in _UNITS.items():
        if name.endswith(end):
            what = name.removesuffix(end).replace("_", " ")
            return f"{what} {number}{unit}".strip()
    return f"{name.replace('_', ' ')} {number}"


_UNITS = {
    "_mb": " MB",
    "_bytes": " bytes",
    "tflop_per_s": " TFLOP/s",
    "gbyte_per_s": " GB/s",
    "_per_s": "/s",
    "_ms": " ms",
    "_us": " us",
    "_s": " s",
}


def require_gpu(device: torch.device) -> None:
    """Raise `Skipped` for a rival that has no code for CPUs."""
    if device.type != "cuda":
        raise Skipped("no CUDA device")


@contextmanager
def memory_may_not_suffice(name: str) -> Iterator[None]:
    """Let a rival that finds no memory be one that cannot be timed; ours has to find it."""
    try:
        yield
    except Exception as error:
        if name == OURS or not is_out_of_memory(error):
            raise
        raise Skipped("out of memory") from error
