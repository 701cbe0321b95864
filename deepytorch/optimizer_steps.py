"""How many optimizer steps were taken: what borders them is where a script's step begins, also under accumulation."""

from __future__ import annotations

from typing import Any

from deepytorch.patches import listen

_taken = 0


def _count(*_: Any) -> None:
    global _taken
    _taken += 1


def _forget() -> None:
    """Nothing to do when torch does not call any more."""


def steps_taken() -> int:
    """Steps of any optimizer of this process, from the first call of this function on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    listen(register_optimizer_step_post_hook, _count, "see where a step of the script's begins", _forget)
    return _taken


class Border:
    """Tells the first look behind an optimizer step from the others."""

    def __init__(self) -> None:
        self._seen = steps_taken()

    def passed(self) -> bool:
        """Whether an optimizer has stepped since this was asked last, or since this was made."""
        before, self._seen = self._seen, steps_taken()
        return self._seen != before
