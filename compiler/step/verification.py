"""Verification (`DEEPYTORCH=verify`): now and then a packed step is compared with the same step padded in eager.

Both are run for the comparison alone, so the values that the script trains on are untouched. Outputs at tokens and the
gradients of every weight are compared. A region whose steps differ logs a warning, and runs padded from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.log import logger

# Relative difference of outputs, and of gradients, that rounding in another order explains.
_ALLOWED = {"single": (1e-4, 1e-3), "half": (3e-2, 0.15)}
_SMALL = 1e-4  # gradients are compared as if they had at least this share of the largest one's norm

Outputs = Callable[[], Sequence[torch.Tensor]]


class Verification:
    """The verification of one region: one of `every` packed steps is compared, the first one among them."""

    def __init__(self, every: int, record: RegionRecord) -> None:
        self._every, self._record, self._count = every, record, 0

    def take_turn(self) -> bool:
        """Count a packed step that begins; return whether it is to be compared."""
        self._count += 1
        return self._count % self._every == 1 or self._every == 1

    def agree(self, packed: Outputs, eager: Outputs, weights: Sequence[torch.Tensor]) -> bool:
        """Run both forms; return whether their outputs, and the gradients of `weights` if there are any, agree."""
        started = time.perf_counter()
        devices = sorted({each.device.index for each in weights if each.is_cuda})
        results = []
        with torch.random.fork_rng(devices), torch.enable_grad():
            for run in (eager, packed):
                outputs = list(run())
                results.append((outputs, _gradients(outputs, weights)))
        differences = _differences(*results)
        worst = max(differences, key=lambda each: each[1] / each[2], default=("nothing", 0.0, 1.0))
        name, found, allowed = worst
        self._record.verified_steps += 1
        self._record.verify_seconds += time.perf_counter() - started
        self._record.largest_difference = max(self._record.largest_difference, found)
        if found <= allowed:  # False for NaN
            return True
        message = f"{self._record.name}: packed and eager steps differ: {name} by {found:.1e} (relative)"
        self._record.fallbacks.append(message)
        logger.log(logging.WARNING, "%s; its steps run padded from now on", message)
        return False


def _gradients(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of a weighted sum of all outputs' entries, with a different factor for each entry."""
    total = None
    for output in outputs:
        if not output.requires_grad or not weights:
            continue
        factors = torch.linspace(0.5, 1.5, max(output.numel(), 1), device=output.device).view(output.shape)
        part = (output.float() * factors).sum() / max(output.numel(), 1)
        total = part if total is None else total + part
    if total is None:
        return []
    return list(torch.autograd.grad(total, list(weights), allow_unused=True))


def _differences(
    eager: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]],
    packed: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]],
) -> list[tuple[str, float, float]]:
    """Return, for each comparison, its name, the relative difference and the allowed one."""
    found = []
    largest = max((float(each.norm()) for each in eager[1] if each is not None), default=0.0)
    for number, (one, other) in enumerate(zip(eager[0], packed[0], strict=True)):
        allowed = _allowed(other)[0]
        found.append((f"output {number}", _apart(one.detach(), other.detach(), 1e-6), allowed))
    for number, (first, second) in enumerate(zip(eager[1], packed[1], strict=True)):
        one_, other_ = (torch.zeros(()) if each is None else each for each in (first, second))
        if first is None and second is None:
            continue
        shaped = one_ if first is not None else other_
        allowed = _allowed(shaped)[1]
        name = f"the gradient of weight {number}, of shape {tuple(shaped.shape)},"
        found.append((name, _apart(one_.to(shaped.device), other_.to(shaped.device), _SMALL * largest), allowed))
    return found


def _allowed(tensor: torch.Tensor) -> tuple[float, float]:
    half = tensor.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(tensor.device.type)
    return _ALLOWED["half" if half else "single"]


def _apart(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    difference = float((one.double() - other.double()).norm())
    return difference / max(float(one.double().norm()), floor, 1e-30)
