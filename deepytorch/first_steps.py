"""The first steps of an armed module: in eager, packed at its door if it has one, until a compile can be afforded.

[Note: What a compile may cost]
Dynamo's trace and the proof run in the training process and stop it for some seconds. (Code is generated beside, see
`compiler.beside`.) No run is to be slower than eager at any point, so the trace waits until the run is old enough for
that pause to be a small share of it, or until steps that were packed at the door have saved as much. What they saved is
measured: one of the first steps runs padded, and tells what a position costs.

    first calls    eager: nothing of ours is even imported
    one of them    as soon as that can be afforded, the door is asked, and watches how outputs are used
    the next one   eager, timed
    later          packed at the door, timed; without a door, eager
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from deepytorch.compiler.attends_by_name import attends_by_name
from deepytorch.compiler.report import STARTS
from deepytorch.process_age import seconds_since_start

SHARE = 0.06  # of the seconds that eager would have taken so far
_TRIED = 3  # packed calls before a door that does not pay is shut
_CAUTION = 0.85
STEP_IN_FORWARDS = 3  # with its backward
PAUSE_SECONDS = 7.0  # to trace, to prove and to load a model of some layers
_TRACE_SECONDS, _TRACE_SECONDS_A_MODULE = 2.5, 0.05  # to trace and to prove a module: a guess on the high side
# Of it, where one trace will do: a 4-layer Llama took 9.4 s of CPU time in place of 12.7 (one run each, busy machine).
_ONE_TRACE = 0.8
_ASK_SECONDS = 0.25  # to ask a door
_DOES_NOT_PAY = "padded until it is compiled: packing these batches takes longer than it saves"


class Budget:
    """Seconds that this process lost and saved by us, against those that eager would have taken."""

    def __init__(self) -> None:
        self.balance = 0.0  # saved, less lost

    def account(self, saved: float) -> None:
        """So many seconds were saved, or lost."""
        before, self.balance = self.balance, self.balance + saved
        if before <= 0.0 < self.balance:
            STARTS.break_even = seconds_since_start()

    def affords(self, seconds: float) -> bool:
        """Whether a pause leaves the run within `SHARE` of eager's."""
        eager = seconds_since_start() + self.balance
        return seconds - self.balance <= SHARE * eager


BUDGET = Budget()


class Door(Protocol):
    """A way to strip padding from a module's batches without its graph, see `integrations.hf_door`."""

    @property
    def is_the_only_way(self) -> bool:
        """Whether no graph of the module could be packed, whatever Dynamo makes of it."""
        ...

    def call(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`, packed if that is possible."""
        ...

    def restore(self) -> None:
        """Take everything back."""
        ...

    def leave(self, reason: str) -> None:
        """Take everything back, and say why in the report."""
        ...


class FirstSteps:
    """Counts and times the calls of one module until it is compiled.

    make_door: makes the module's door, if it has one, for these steps alone. then: what its calls run afterwards, and a
    door for those.
    """

    def __init__(
        self,
        module: nn.Module,
        make_door: Callable[[], Door | None],
        then: Callable[[], tuple[Callable[..., Any], Any]],
    ) -> None:
        self._cost = _TRACE_SECONDS + _TRACE_SECONDS_A_MODULE * sum(1 for _ in module.modules())
        self._make_door, self.then = make_door, then
        self._door: Door | None = None
        self._calls = 0
        self._asked = 0  # in which call the door was asked
        self._seconds_a_position: float | None = None  # of a padded forward
        self._saved = 0.0
        self._over = False

    def over(self) -> bool:
        """A call begins: whether it, and all after it, may be traced and proved."""
        self._calls += 1
        if self._calls == 2 and STARTS.first_step is None:
            STARTS.first_step = seconds_since_start()
        if not self._over:
            since = self._calls - self._asked
            measured = self._asked > 0 and (self._door is None or since > 1)
            self._over = measured and BUDGET.affords(self._cost)
        return self._over

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that is not traced."""
        if not self._asked and self._calls > 1 and BUDGET.affords(_ASK_SECONDS):
            self._asked, self._door = self._calls, self._make_door()
            marked_ahead = self._door is None or not self._door.is_the_only_way
            self._cost *= _ONE_TRACE if marked_ahead and attends_by_name(module) else 1.0
        if self._door is None:
            return module._call_impl(*args, **kwargs)
        if self._calls == self._asked + 1:
            return self.timed(module._call_impl, args, kwargs)
        door = self._door
        return self.timed(lambda *args, **kwargs: door.call(module._call_impl, args, kwargs), args, kwargs)

    def timed(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`, and what it has saved is put down."""
        started = time.perf_counter()
        outputs = run(*args, **kwargs)
        self._account(time.perf_counter() - started, args, kwargs)
        return outputs

    def _account(self, seconds: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        batch = next((each for each in (*args, *kwargs.values()) if _is_batch(each)), None)
        if batch is None or batch.device.type != "cpu":  # elsewhere a call returns before it is computed
            return
        positions = batch.shape[0] * batch.shape[1]
        if self._calls == self._asked + 1:
            self._seconds_a_position = seconds / max(1, positions)
        elif self._seconds_a_position is not None:
            padded = self._seconds_a_position * positions
            saved = padded - seconds
            paused = seconds > STEP_IN_FORWARDS * padded  # by a trace: the backward goes on as ever
            BUDGET.account(saved if paused else _CAUTION * STEP_IN_FORWARDS * saved)
            self._saved += saved
            tried = self._calls > self._asked + _TRIED + 1 and not self._over
            if tried and self._saved < 0 and self._door is not None:  # a small model: packing costs more
                self._door.leave(_DOES_NOT_PAY)
                self._door = None

    def restore(self) -> None:
        """Take everything back: the module has no door any more."""
        if self._door is not None:
            self._door.restore()
            self._door = None


def _is_batch(value: Any) -> bool:
    """Whether an argument has rows and positions: ids, or embeddings."""
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.numel() > 0
