"""The first steps of an armed module: in eager, packed at its door if it has one, until a compile can be afforded.

The trace waits until the run can afford it, see [Note: What a pause may cost]. What packed steps saved is measured: two
of the first steps run padded, and the faster one tells what a position costs. (By a slow one alone packing would seem
to save what it does not. So it would by small batches, of which each position costs more than of large ones: what a
batch larger than both saves is counted against the larger of them, and what it loses against the cost by position.)

    first calls     eager: nothing of ours is even imported
    one of them     as soon as that can be afforded, the door is asked, and watches how outputs are used
    the next three  eager, packed at the door, eager; timed
    later           packed at the door, timed; without a door, eager

Ranks of a DistributedDataParallel module wait for each other in every backward, so that pauses in different steps add
up. Rank 0 decides for all (`SameStep`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.compiler.attends_by_name import attends_by_name
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.agreement import SameStep
from deepytorch.compiler.report import STARTS
from deepytorch.process_age import seconds_since_start

_PADDED = (1, 3)  # which calls after the one in which the door was asked run padded
_TRIED = 3  # packed calls before a door that does not pay is shut
_CAUTION = 0.85
STEP_IN_FORWARDS = 3  # with its backward
PAUSE_SECONDS = 7.0  # to trace, to prove and to load a model of some layers
_TRACE_SECONDS, _TRACE_SECONDS_A_MODULE = 2.5, 0.05  # to trace and to prove a module: a guess on the high side
# Of it, where one trace will do: a 4-layer Llama took 9.4 s of CPU time in place of 12.7 (one run each, busy machine).
_ONE_TRACE = 0.8
_ASK_SECONDS = 0.25  # to ask a door
_DOES_NOT_PAY = "padded until it is compiled: packing these batches takes longer than it saves"


def _same_step() -> SameStep | None:
    """Of the DistributedDataParallel module in whose forward this is; None elsewhere, or where a rank is alone."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from deepytorch.compiler.code.data_parallel import active, change_over_of

    ddp = active()
    if ddp is None or ddp.process_group.size() == 1:
        return None
    change_over = change_over_of(ddp)
    return SameStep(change_over.name, change_over.store, ddp.process_group.rank())


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
    door for those, given the seconds that the first trace is thought to take, and whether packing pays in eager.
    """

    def __init__(
        self,
        module: nn.Module,
        make_door: Callable[[], Door | None],
        then: Callable[[float, bool], tuple[Callable[..., Any], Any]],
    ) -> None:
        self._cost = _TRACE_SECONDS + _TRACE_SECONDS_A_MODULE * sum(1 for _ in module.modules())
        self._make_door, self._then = make_door, then
        self._door: Door | None = None
        self._calls = 0
        self._asked = 0  # in which call the door was asked
        self._seconds_a_position: float | None = None  # of a padded forward, of up to so many positions:
        self._most_positions = 0
        self._saved, self._pays = 0.0, True
        self._together: SameStep | None = None
        self._over = False

    def then(self) -> tuple[Callable[..., Any], Any]:
        """What the module's calls run from now on, and its door for those."""
        return self._then(self._cost, self._pays)

    def has_looked(self) -> bool:
        """Return whether a door was asked, or the module may be traced: its code has to stay what it is."""
        return self._over or self._asked > 0

    def over(self) -> bool:
        """A call begins: whether it, and all after it, may be traced and proved."""
        self._calls += 1
        if self._calls == 1:
            self._together = _same_step()
        if self._calls == 2 and STARTS.first_step is None:
            STARTS.first_step = seconds_since_start()
        if not self._over:
            since = self._calls - self._asked
            measured = self._asked > 0 and (self._door is None or since > _PADDED[-1])
            affordable = measured and BUDGET.affords(self._cost)
            self._over = affordable if self._together is None else self._together.has_come(self._calls, affordable)
        return self._over

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that is not traced."""
        if not self._asked and self._calls > 1 and BUDGET.affords(_ASK_SECONDS):
            self._asked, self._door = self._calls, self._make_door()
            marked_ahead = self._door is None or not self._door.is_the_only_way
            self._cost *= _ONE_TRACE if marked_ahead and attends_by_name(module) else 1.0
        if self._door is None:
            return module._call_impl(*args, **kwargs)
        if self._is_padded():
            return self.timed(module._call_impl, args, kwargs)
        door = self._door
        return self.timed(lambda *args, **kwargs: door.call(module._call_impl, args, kwargs), args, kwargs)

    def timed(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`, and what it has saved is put down."""
        started, paused = time.perf_counter(), BUDGET.paused
        outputs = run(*args, **kwargs)
        self._account(time.perf_counter() - started - (BUDGET.paused - paused), args, kwargs)
        return outputs

    def _account(self, seconds: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        batch = next((each for each in (*args, *kwargs.values()) if _is_batch(each)), None)
        if batch is None or batch.device.type != "cpu":  # elsewhere a call returns before it is computed
            return
        positions = batch.shape[0] * batch.shape[1]
        if self._is_padded():
            fastest = self._seconds_a_position or math.inf
            self._seconds_a_position = min(fastest, seconds / max(1, positions))
            self._most_positions = max(self._most_positions, positions)
        elif self._seconds_a_position is not None and self._calls > self._asked + _PADDED[-1]:
            padded = self._seconds_a_position * positions  # at most: a larger batch costs less a position
            least = self._seconds_a_position * min(positions, self._most_positions)
            saved = max(least - seconds, 0.0) + min(padded - seconds, 0.0)
            paused = seconds > STEP_IN_FORWARDS * padded  # by something else: the backward goes on as ever
            BUDGET.account(saved if paused else _CAUTION * STEP_IN_FORWARDS * saved)
            self._saved += saved
            tried = self._calls > self._asked + _PADDED[-1] + _TRIED and not self._over
            if tried and self._saved < 0 and self._door is not None:  # a small model: packing costs more
                self._door.leave(_DOES_NOT_PAY)
                self._door, self._pays = None, False

    def _is_padded(self) -> bool:
        """Whether this call is one of those that tell what a position costs."""
        return not self._over and self._asked > 0 and self._calls - self._asked in _PADDED

    def restore(self) -> None:
        """Take everything back: the module has no door any more."""
        if self._door is not None:
            self._door.restore()
            self._door = None


def _is_batch(value: Any) -> bool:
    """Whether an argument has rows and positions: ids, or embeddings."""
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.numel() > 0
