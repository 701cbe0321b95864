"""Verification (`DEEPYTORCH=verify`): now and then a packed step is compared with the same step padded in eager.

Both are run for the comparison alone, so the values that the script trains on are untouched. A region whose steps
differ logs a warning, and runs padded from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.agreement import OF_STEPS, largest_difference, precision_of
from deepytorch.log import logger

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
        with torch.random.fork_rng(devices), torch.enable_grad():
            expected, found = list(eager()), list(packed())
            tolerance = OF_STEPS[precision_of([*expected, *weights])]
            worst = largest_difference(expected, found, weights, tolerance)
        self._record.verified_steps += 1
        self._record.verify_seconds += time.perf_counter() - started
        self._record.largest_difference = max(self._record.largest_difference, worst.found)
        if worst.is_allowed:
            return True
        message = f"{self._record.name}: packed and eager steps differ: {worst.what} by {worst.found:.1e} (relative)"
        self._record.fallbacks.append(message)
        logger.log(logging.WARNING, "%s; its steps run padded from now on", message)
        return False
