"""Compiled code for whole batches that is compared with eager before its first step, and left if it differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepytorch.compiler.code.compiled_step import CALLS_A_STEP, StepBoundary
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.tuner import Eager, Form
from deepytorch.log import once
from deepytorch.torch_internals import current_graph_task_id

_MOST_ATTEMPTS = 3  # steps whose comparison may come to nothing, as for want of memory


class Guarded:
    """The compiled code of one region, see [Note: Ladder].

    Args:
        code: The code to begin with.
        by_operators: Its graph, operator by operator; None if that keeps more for the backward than the code does.
        strict: Makes code of the same graph with strict numerics; None in place of code if there is none.
        plain: Makes code of the graph without the passes that have changed it, likewise.
        eager: The form that all are compared with.
        guard: The comparison.
        record: The region's record in the report.
        gives_up: Called when no code is left.
        every: One of so many steps is compared; None: the first one.
    """

    def __init__(
        self,
        code: Form,
        by_operators: Form | None,
        strict: Callable[[], Form | None],
        plain: Callable[[], Form | None],
        eager: Eager,
        guard: Guard,
        record: RegionRecord,
        gives_up: Callable[[], None],
        every: int | None = None,
    ) -> None:
        self._code: Form | None = code
        self._by_operators: Form | None = by_operators
        self._others: list[Callable[[], Form | None]] = [strict, plain]
        self._eager, self._guard, self._record, self._gives_up = eager, guard, record, gives_up
        self._every, self._steps, self._attempts = every, 0, 0
        self._is_compared = False
        self._boundary, self._calls = StepBoundary(), 0  # of the script's steps; calls since the last one

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Advance the compilation; return whether a call with these inputs may run the code now."""
        if self._code is None or not self._code.poll(inputs):
            return False
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return True
        passed = self._boundary.passed()
        self._calls = 0 if passed else self._calls + 1
        if self._steps and not passed and self._calls <= CALLS_A_STEP:  # reducers may wait for this step's backward
            return self._is_compared or self._attempts > 0
        self._steps += 1
        is_due = self._every is not None and self._steps % self._every == 0
        return (self._is_compared and not is_due) or self._compare(self._code, inputs)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the code."""
        assert self._code is not None
        return self._code(inputs)

    def _compare(self, code: Form, inputs: Sequence[Any]) -> bool:
        """Return whether the code may run: it agrees with eager, or cannot be compared."""
        difference = self._guard.difference(self._eager, code, inputs)
        if difference:
            self._leave(code, difference, inputs)
            return False
        self._attempts += difference is None
        self._is_compared = difference is not None or self._attempts >= _MOST_ATTEMPTS
        if self._is_compared and self._every is None:
            self._by_operators = None
            self._others.clear()
        return True

    def _leave(self, code: Form, difference: str, inputs: Sequence[Any]) -> None:
        """Go on with other code, or in eager if there is none: without what is to blame, the compiler or a pass."""
        by_operators, self._by_operators = self._by_operators, None
        others, self._others = self._others, []
        of_graph = by_operators is not None and bool(self._guard.difference(self._eager, by_operators, inputs))
        self._code = others[of_graph]() if others else None
        self._is_compared, self._attempts = False, 0
        name = self._eager.name if self._code is None else self._code.name
        message = f"{self._record.name}: {code.name} differs from eager: {difference}; it is left for {name}"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s", message)
        if self._code is None:
            self._gives_up()
