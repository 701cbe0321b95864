"""Counts of optimizer steps: a script's step begins at an optimizer-step boundary, with gradient accumulation too."""

from __future__ import annotations

from typing import Any

from deepytorch.patches import listen

_taken = 0


def _count(*_: Any) -> None:
    global _taken
    _taken += 1


def _forget() -> None:
    """Do nothing when torch stops calling `_count`."""


def steps_taken() -> int:
    """Return the number of steps of all optimizers of this process since the first call of this function."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    listen(register_optimizer_step_post_hook, _count, "see where a step of the script's begins", _forget)
    return _taken


class StepBoundary:
    """A detector of optimizer-step boundaries."""

    def __init__(self) -> None:
        self._seen = steps_taken()

    def passed(self) -> bool:
        """Return whether an optimizer has stepped since the last call of this, or since the detector was made."""
        before, self._seen = self._seen, steps_taken()
        return self._seen != before
