"""Checks of `gpu-check`: on a GPU, another process compiles from sizes alone, and training finds what it has left.

The checks have not run on a GPU yet. On a CPU they make the same way, but for Triton and the device's memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from deepytorch import paused
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.training_step import to_device
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.config import process_environment
from deepytorch.data import text_batches
from deepytorch.gpu_check.outcome import Check, Failed

_SECONDS = 200.0  # for the process to start and to compile; steps go on meanwhile
_DEADLINE_S = 240.0
_PAUSE_S = 0.05  # after each step: on a machine with few cores the process, of low priority, would get none
_NEAR = 1e-3  # relative difference of the loss, compiled and in eager, in float32
_MODES = (None, "reduce-overhead")


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks, each in a process of its own."""
    for mode in _MODES:
        group = f"compiled in the background: {mode or 'default'}"
        run = partial(compiled_in_background, device, mode)
        yield Check(group, "a Llama", run, quick=False, deadline_s=_DEADLINE_S, expected_s=60.0)


def compiled_in_background(device: torch.device, mode: str | None = None) -> str:
    """Train a small Llama until code runs that another process has compiled; return what that took.

    Raises `Failed` if this process had to compile in its place, with the part of the key that differed, if nothing was
    compiled in time, or if the loss is not eager's.

    Args:
        device: Where the model trains.
        mode: The mode of `torch.compile`; the option `gpu_background` is set.
    """
    with tempfile.TemporaryDirectory(prefix="deepytorch-gpu-check-") as folder:  # nothing of an earlier run is found
        process_environment().update(XDG_CACHE_HOME=folder, TORCHINDUCTOR_CACHE_DIR=f"{folder}/torch")
        model: nn.Module = build_model("llama", "tiny", vocab_size=512, seed=0)
        model = model.to(device)
        options: dict[str, Any] = {"gpu_background": True, "wait": False, "mode": mode}
        call = torch.compile(model, backend="deepytorch", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        drawn = text_batches(None, 512, batch_size=8, max_length=256, kind=batch_kind("llama"), steps=4)
        batches = [to_device(each, device) for each in drawn]
        begin, seconds = time.monotonic(), list[float]()
        taken = _Taken(device)
        while not _is_over(LEDGER.report().regions) and time.monotonic() < begin + _SECONDS:
            at = time.monotonic()
            call(**batches[len(seconds) % 4]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - at)
            taken.look()
            time.sleep(_PAUSE_S)
        regions = LEDGER.report().regions
        if not _is_over(regions):
            why = [reason for each in regions for reason in each.fallbacks]
            raise Failed(f"not compiled within {_SECONDS:.0f} s, {len(seconds)} steps: {'; '.join(why) or 'no reason'}")
        compiled = float(call(**batches[0]).loss.detach())
        with paused():
            eager = float(model(**batches[0]).loss.detach())
    wrong = [reason for each in regions for reason in each.compiled_here]
    wrong += [f"{each.name} was compiled by {each.compiled_by}" for each in regions if each.compiled_by != "a process"]
    if abs(compiled - eager) > _NEAR * abs(eager):
        wrong.append(f"the loss is {compiled}, and {eager} in eager")
    if wrong:
        raise Failed("; ".join(wrong))
    return (
        f"{len(regions)} graphs in {sum(each.compile_seconds_in_background for each in regions):.0f} s, {len(seconds)} "
        f"steps meanwhile, the longest {max(seconds):.1f} s (a trace), the one that loaded code {seconds[-1]:.1f} s; "
        f"all other processes together took {taken.most_bytes / 2**20:.0f} MB more of the device"
    )


def _is_over(regions: list[RegionRecord]) -> bool:
    return bool(regions) and all(each.compiled_by or each.fallbacks for each in regions)


class _Taken:
    """The device's memory that other processes have taken since this was made; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.most_bytes = device, 0
        self._before = self._used_elsewhere()

    def look(self) -> None:
        """Look at it now."""
        self.most_bytes = max(self.most_bytes, self._used_elsewhere() - self._before)

    def _used_elsewhere(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)
