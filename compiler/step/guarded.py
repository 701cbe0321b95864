"""Compiled code for whole batches that is compared with eager before its first step, and left if it differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.tuner import Eager, Form
from deepytorch.log import once
from deepytorch.torch_internals import current_graph_task_id


class Guarded:
    """The compiled code of one region, see [Note: Ladder].

    Args:
        first: The code to begin with.
        others: What makes other code, to be taken in turn if the code before has differed from eager; None in place of
            code if there is none.
        eager: The form that it is compared with.
        guard: The comparison.
        record: The region's record in the report.
    """

    def __init__(
        self, first: Form, others: Sequence[Callable[[], Form | None]], eager: Eager, guard: Guard, record: RegionRecord
    ) -> None:
        self._code: Form | None = first
        self._others, self._eager, self._guard, self._record = list(others), eager, guard, record
        self._is_compared = False

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Advance the compilation; return whether a call with these inputs may run the code now."""
        if self._code is None or not self._code.poll(inputs):
            return False
        if self._is_compared or not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return True
        difference = self._guard.difference(self._eager, self._code, inputs)
        self._is_compared = difference is None
        if difference is not None:
            self._leave(self._code, difference)
        return self._is_compared

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the code."""
        assert self._code is not None
        return self._code(inputs)

    def _leave(self, code: Form, difference: str) -> None:
        """Go on with other code, or in eager if there is none."""
        self._code = None
        while self._code is None and self._others:
            self._code = self._others.pop(0)()
        name = self._eager.name if self._code is None else self._code.name
        message = f"{self._record.name}: {code.name} differs from eager: {difference}; it runs {name} from now on"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s", message)
