"""The first steps of an armed module: in eager, packed at model entry if possible, until a compile can be afforded.

The trace waits until the run can afford it, see [Note: What a pause may cost]. The savings of packed steps are
measured: two of the first steps run padded, and the faster one gives the cost of a position. (With a slow one alone
packing would seem to save more than it does. Small batches would have the same effect, since each of their positions
costs more than one of a large batch. So for a batch larger than both, savings are counted against the larger of the two
padded batches, and losses against the cost by position.)

    first calls     eager: nothing of ours is even imported
    one of them     as soon as it can be afforded, the model is proved for packing at entry, and outputs are profiled
    the next three  eager, packed at entry, eager; timed
    later           packed at entry, timed; eager if the model cannot be packed at entry
    a trace that was ended, as it took longer than can be afforded: on as before, until twice its time is affordable

Ranks of a DistributedDataParallel module wait for each other in every backward, so that pauses in different steps add
up. Rank 0 names the call in which all trace (`SameStep`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.agreement import SameStep
from deepytorch.compiler.dynamo.attends_by_name import attends_by_name
from deepytorch.compiler.report import STARTS
from deepytorch.ddp_modules import copies_outputs
from deepytorch.process_facts import seconds_since_start

_PADDED = (1, 3)  # which calls after the one with the proof at entry run padded
_TRIED = 3  # packed calls before packing at entry that does not pay is given up
_CAUTION = 0.85
STEP_IN_FORWARDS = 3  # the time of a step, with its backward, in forwards
PAUSE_SECONDS = 7.0  # to trace, to prove and to load a model of some layers
_TRACE_SECONDS, _TRACE_SECONDS_A_MODULE = 2.5, 0.05  # to trace and to prove a module: a high estimate
# The share of it if one trace is enough: a 4-layer Llama took 9.4 s of CPU time in place of 12.7 (one run each, on a
# busy machine).
_ONE_TRACE = 0.8
ASK_SECONDS = 0.25  # to prove a model at entry
_DOES_NOT_PAY = "padded until it is compiled: packing these batches takes longer than it saves"


def _same_step(known: SameStep | None) -> SameStep | None:
    """Watch the DistributedDataParallel module whose forward runs, if any; return the agreement of its ranks.

    known: the agreement so far. It stays the same if the script wraps its model once more: calls are counted through.
    """
    if not dist.is_available() or not dist.is_initialized():
        return known
    from deepytorch.compiler.code.data_parallel import active, takeover_of

    ddp = active()
    if ddp is None or (ddp.process_group.size() == 1 and not copies_outputs(ddp)):
        return known
    takeover = takeover_of(ddp)
    if known is not None or ddp.process_group.size() == 1:
        return known
    return SameStep(takeover.name, takeover.store, ddp.process_group.rank())


class FirstEntry(Protocol):
    """The packing of batches at a module's entry, without its graph, see `integrations.model_entry`."""

    @property
    def is_the_only_way(self) -> bool:
        """Return whether no graph of the module could be packed, however Dynamo traces it."""
        ...

    @property
    def replaces_calls(self) -> bool:
        """Return whether calls of modules inside are replaced, which would cut Dynamo's graphs of the module."""
        ...

    def call(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `run(*args, **kwargs)`, packed if that is possible."""
        ...

    def restore(self) -> None:
        """Undo all changes of the module."""
        ...

    def leave(self, reason: str) -> None:
        """Undo all changes of the module, and give the reason in the report."""
        ...


class FirstSteps:
    """The counts and times of one module's calls until it is compiled.

    make_entry: makes the module's `FirstEntry` for these steps alone, if it has one. then: gives the callable of later
    calls and a `FirstEntry` for those, from the estimated seconds of the first trace and from whether packing pays in
    eager.
    """

    def __init__(
        self,
        module: nn.Module,
        make_entry: Callable[[], FirstEntry | None],
        then: Callable[[float, bool], tuple[Callable[..., Any], Any]],
    ) -> None:
        self._cost = _TRACE_SECONDS + _TRACE_SECONDS_A_MODULE * sum(1 for _ in module.modules())
        self._make_entry, self._then = make_entry, then
        self._entry: FirstEntry | None = None
        self._calls = 0
        self._asked = 0  # the number of the call with the proof at entry
        self._seconds_a_position: float | None = None  # of a padded forward of up to `_most_positions`
        self._most_positions = 0
        self._saved, self._pays = 0.0, True
        self._together: SameStep | None = None
        self._over = False

    def then(self) -> tuple[Callable[..., Any], Any]:
        """Return the callable of the module's calls from now on, and the `FirstEntry` for those."""
        return self._then(self._cost, self._pays)

    @property
    def entry(self) -> FirstEntry | None:
        """Return the packing at the module's entry, once the module was proved there."""
        return self._entry

    def has_looked(self) -> bool:
        """Return whether the module was proved at entry or may be traced: then its code must not change."""
        return self._over or self._asked > 0

    def over(self) -> bool:
        """Count a call that begins; return whether this call, and all later ones, may be traced and proved."""
        self._calls += 1
        if self._calls == 2 and STARTS.first_step is None:
            STARTS.first_step = seconds_since_start()
        if not self._over:
            self._together = _same_step(self._together)
            since = self._calls - self._asked
            measured = self._asked > 0 and (self._entry is None or since > _PADDED[-1])
            affordable = measured and BUDGET.affords(self._cost)
            self._over = affordable if self._together is None else self._together.has_come(self._calls, affordable)
        return self._over

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call that is not traced."""
        if not self._asked and self._calls > 1 and BUDGET.affords(ASK_SECONDS):
            self._asked, self._entry = self._calls, self._make_entry()
            marked_ahead = self._entry is None or not self._entry.is_the_only_way
            self._cost *= _ONE_TRACE if marked_ahead and attends_by_name(module) else 1.0
        if self._entry is None:
            return module._call_impl(*args, **kwargs)
        if self._is_padded():
            return self.timed(module._call_impl, args, kwargs)
        entry = self._entry
        return self.timed(lambda *args, **kwargs: entry.call(module._call_impl, args, kwargs), args, kwargs)

    def timed(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `run(*args, **kwargs)`, and account for the time that it has saved."""
        started, paused = time.perf_counter(), BUDGET.paused
        outputs = run(*args, **kwargs)
        self._account(time.perf_counter() - started - (BUDGET.paused - paused), args, kwargs)
        return outputs

    def _account(self, seconds: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        batch = batch_of(args, kwargs)
        if batch is None or batch.device.type != "cpu":  # on other devices a call returns before it is computed
            return
        positions = batch.shape[0] * batch.shape[1]
        if self._is_padded():
            fastest = self._seconds_a_position or math.inf
            self._seconds_a_position = min(fastest, seconds / max(1, positions))
            self._most_positions = max(self._most_positions, positions)
        elif self._seconds_a_position is not None and self._calls > self._asked + _PADDED[-1]:
            padded = self._seconds_a_position * positions  # an upper bound: a larger batch costs less by position
            least = self._seconds_a_position * min(positions, self._most_positions)
            saved = max(least - seconds, 0.0) + min(padded - seconds, 0.0)
            paused = seconds > STEP_IN_FORWARDS * padded  # something else paused the call, and not the backward
            BUDGET.account(saved if paused else _CAUTION * STEP_IN_FORWARDS * saved)
            self._saved += saved
            tried = self._calls > self._asked + _PADDED[-1] + _TRIED and not self._over
            if tried and self._saved < 0 and self._entry is not None:  # for a small model packing costs more
                self._entry.leave(_DOES_NOT_PAY)
                self._entry, self._pays = None, False

    def resume(self, entry: FirstEntry | None, seconds: float) -> None:
        """Go on as before the trace, which the run could not afford; it is begun again when the run can.

        Steps that a trace was to replace would else run padded. Ranks do not come back: they have agreed on their step.

        Args:
            entry: The packing at entry, which is used if it has paid.
            seconds: The time of the trace that was ended; 0 if it was not begun.
        """
        if self._together is None:
            self._over, self._cost = False, 2 * max(seconds, self._cost)
            self._entry = entry if self._pays and self._asked else None

    def _is_padded(self) -> bool:
        """Return whether this call runs padded to measure the cost of a position."""
        return not self._over and self._asked > 0 and self._calls - self._asked in _PADDED

    def restore(self) -> None:
        """Undo packing at the module's entry."""
        if self._entry is not None:
            self._entry.restore()
            self._entry = None


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first argument that has rows and positions, (rows, positions, ...); None if there is none."""
    return next((each for each in (*args, *kwargs.values()) if _is_batch(each)), None)


def _is_batch(value: Any) -> bool:
    """Return whether an argument has rows and positions: ids, or embeddings."""
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.numel() > 0
