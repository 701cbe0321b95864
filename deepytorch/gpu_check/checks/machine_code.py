"""Machine code of every kernel for this device, compiled on all cores before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

import torch

from deepytorch.bench.kernels import variants
from deepytorch.gpu_check.outcome import Check, Failed, Skipped
from deepytorch.machine_code import CAPABILITIES, compile_for, troubles

_FEW = 6  # variants, where this is only tried
_MOST = 32  # processes, each of which loads torch and Triton


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the one check."""
    run = partial(machine_code, device)
    yield Check("machine code", "every kernel, on all cores", run, is_first=True, deadline_s=240.0, expected_s=40.0)


def machine_code(device: torch.device) -> str:
    """Compile every variant; none may spill, take too much shared memory, or multiply without tensor cores."""
    if find_spec("triton") is None or "TRITON_INTERPRET" in os.environ:
        raise Skipped("Triton is not installed, or interprets its kernels")
    capability = 90 if device.type == "cpu" else 10 * torch.cuda.get_device_capability(device)[0]
    if device.type == "cuda":
        capability += torch.cuda.get_device_capability(device)[1]
    nearest = max((each for each in CAPABILITIES if each <= capability), default=None)
    if nearest is None:
        raise Skipped(f"compute capability {capability / 10}; kernels are for 8.0 and newer")
    count = len(list(variants()))
    numbers = range(0, count, count // _FEW) if device.type == "cpu" else range(count)
    # Not forked, since this process has used the device.
    processes = min(os.cpu_count() or 1, len(numbers), _MOST)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = [each for each in pool.map(partial(_troubles, capability=nearest), numbers) if each is not None]
    if found:
        kernel = found[0].partition(",")[0]
        text = "; ".join(found)
        raise Failed(text, call=f"deepytorch bench kernels --named {kernel} --capabilities {nearest}")
    return f"{len(numbers)} variants for sm_{nearest}"


def _troubles(number: int, capability: int) -> str | None:
    """Compile the variant of a number; return in words what is wrong with it."""
    variant = list(variants())[number]
    try:
        found = troubles(variant, compile_for(variant, capability))
    except Exception as error:  # Triton's may not be sent to another process
        found = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
    name = variant.kernel.rpartition(":")[2].lstrip("_")
    return f"{name}, {variant.label}: {'; '.join(found)}" if found else None
