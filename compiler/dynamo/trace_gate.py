"""The gate between Dynamo's frame evaluation and its tracer: it decides which frames are traced, and when.

Dynamo asks for a trace of each frame that it has no code for: at the first call, after a graph break, and when a guard
fails because the script has changed something. A trace takes seconds, and training waits. So the gate lets a frame be
traced only if the run can afford it (see [Note: What a pause may cost]). Else that frame runs in eager, as plain
Python, and the frames that it calls use code that is compiled already. A trace that fails ends in the same way.

The time of a trace is known only after it. So a trace that takes longer than the run can afford is ended, and twice the
time is expected of the next one.

A frame is also left to eager in two cases that the backend reports (`Trace.leave`): its graph would not do the same as
the module; or the graph could only be compiled in the training process, and the run is too short to pay for that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import torch

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.outcome import Outcome, tell
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.log import logger, once
from deepytorch.patches import replace
from deepytorch.torch_internals import (
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
    current_graph_task_id,
    dynamo_config,
    dynamo_tracer,
)

_NEVER = float("inf")
_OF_PAUSE = 0.9  # the share of a pause for the trace itself; the rest is to clean up after one that was ended


@dataclass
class TracedCode:
    """The knowledge of one code object that was traced, or was to be.

    seconds: the time of its last trace. extra_seconds: an estimate of the time to compile it in this process; infinite
    if it is to stay in eager. sizes: those of batches for which its graphs came out with fixed sizes.
    """

    seconds: float | None = None
    extra_seconds: float = 0.0
    sizes: set[Any] = field(default_factory=set)

    def is_fixed(self) -> bool:
        """Return whether each new size would be traced anew: two traces came out for the sizes of their batches."""
        return len(self.sizes) > 1


@dataclass
class TraceHistory:
    """The history of traces of the modules of one class.

    Attributes:
        first_seconds: An estimate of the first trace's time.
        granted: Whether the next frame may be traced at any cost, as ranks have agreed to trace in the same step.
        packs_in_eager: Whether packed steps that are not compiled were no slower than padded ones.
        asserts_scalars: As `asserts_scalars` found of a module of the class; None before it was asked.
        codes: The knowledge of each code object.
    """

    first_seconds: float = 0.0
    granted: bool = False
    packs_in_eager: bool = True
    asserts_scalars: bool | None = None
    codes: dict[CodeType, TracedCode] = field(default_factory=dict)

    def of(self, code: CodeType) -> TracedCode:
        """Return the knowledge of a code object."""
        return self.codes.setdefault(code, TracedCode())

    def expected_seconds(self, code: CodeType) -> float:
        """Return an estimate of the time for the next trace of a code object and for compiling it in this process."""
        known = self.of(code)
        if known.is_fixed():
            return _NEVER
        longest = max((each.seconds for each in self.codes.values() if each.seconds is not None), default=None)
        seconds = known.seconds if known.seconds is not None else longest
        return (self.first_seconds if seconds is None else seconds) + known.extra_seconds


class LeftToEager(Exception):
    """An exception that ends a trace; the frame runs in eager, as plain Python."""


@dataclass
class Trace:
    """One frame while Dynamo traces it and the backend compiles its graph.

    Attributes:
        code: The knowledge of its code object.
        in_place: Whether its graph may be compiled in this process if no other process can compile it.
        packs_in_eager: As in `TraceHistory`.
        deadline: The time by `perf_counter` after which the trace is ended.
        is_too_long: Whether it was ended for that.
        reason: The reason for which the frame is left to eager.
    """

    code: TracedCode
    in_place: bool
    packs_in_eager: bool
    deadline: float = _NEVER
    is_too_long: bool = False
    reason: str | None = None

    def is_traced(self) -> None:
        """Lift the deadline: to compile the graph in this process, with nested traces, was affordable and may end."""
        self.deadline = _NEVER

    def leave(self, reason: str, extra_seconds: float = _NEVER) -> NoReturn:
        """Leave the frame to eager. extra_seconds: the time that a run has to afford, with the trace, for a new try."""
        self.reason, self.code.extra_seconds = reason, extra_seconds
        raise LeftToEager(reason)


_CURRENT: ContextVar[Trace | None] = ContextVar("deepytorch_trace", default=None)


def current_trace() -> Trace | None:
    """Return the trace under way; None for a graph for which the script itself called `torch.compile`."""
    return _CURRENT.get()


class TraceGate:
    """The gate in place of Dynamo's callback of a compiled function.

    traces: Dynamo's own callback. waits: whether training waits for every trace, as under `torch.compile`.
    """

    def __init__(self, traces: Callable[..., Any], name: str, history: TraceHistory, waits: bool) -> None:
        self._torchdynamo_orig_backend = traces  # under this name Dynamo looks for the backend behind a callback
        self._name, self._history, self._waits = name, history, waits
        self._told: set[str] = set()
        watch_traces()

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        code: CodeType = frame.f_code
        known = self._history.of(code)
        if not self._may_trace(code, known):
            if known.extra_seconds != _NEVER:
                tell(Outcome.PUT_OFF)
            return _in_eager()
        started = time.perf_counter()
        in_place, packs = self._waits or known.extra_seconds > 0, self._history.packs_in_eager
        trace = Trace(known, in_place, packs, started + self._longest())
        token, factor = _CURRENT.set(trace), 1
        try:
            # Two settings of Dynamo make code behave as in eager: hooks that come or go later are seen, and numbers
            # that a forward draws from NumPy stay NumPy's, and do not come from torch's generator.
            as_eager = dynamo_config.patch(skip_nnmodule_hook_guards=False, use_numpy_random_stream=True)
            scalars = self._history.asserts_scalars
            asserted = dynamo_config.patch(capture_scalar_outputs=True) if scalars else contextlib.nullcontext()
            with BUDGET.pause(), as_eager, asserted:
                return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            if trace.is_too_long:
                factor = 2
                tell(Outcome.PUT_OFF)
                return _in_eager()
            if trace.reason is not None:
                self._tell(trace.reason)
                return _in_eager()
            logger.debug("traceback of the failure", exc_info=error)
            self._tell(f"Dynamo could not follow it ({type(error).__name__}); details at level debug")
            return ConvertFrameReturn()  # the frame is not traced again; the frames that it calls may be
        finally:
            _CURRENT.reset(token)
            known.seconds = factor * (time.perf_counter() - started)

    def _longest(self) -> float:
        """Return the seconds that a trace may take: without a limit among ranks, which have all agreed to trace."""
        among_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        return _NEVER if self._waits or among_ranks else _OF_PAUSE * BUDGET.longest_pause()

    def _may_trace(self, code: CodeType, known: TracedCode) -> bool:
        if known.extra_seconds == _NEVER:
            return False
        granted, self._history.granted = self._history.granted, False
        if not self._waits and current_graph_task_id() != -1:  # a checkpoint has to recompute a part as it ran first
            return False
        return self._waits or granted or BUDGET.affords(self._history.expected_seconds(code))

    def _tell(self, reason: str) -> None:
        once(logging.INFO, "a part of %s runs in eager: %s", self._name, reason)
        if reason not in self._told:
            self._told.add(reason)
            LEDGER.open(RegionRecord(f"a part of {self._name}", "eager", "", declined=[reason]))


def end_if_too_long() -> None:
    """End the trace under way if the run cannot afford any more of it."""
    trace = _CURRENT.get()
    if trace is not None and time.perf_counter() > trace.deadline:
        trace.is_too_long = True
        raise LeftToEager("the trace takes longer than the run can afford")


def _step(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap Dynamo's tracing of one instruction, to end traces that take too long."""

    def step(translator: Any) -> bool:
        end_if_too_long()
        return original(translator)

    return step


def watch_traces() -> None:
    """Have Dynamo's tracer check before each instruction if there is time left."""
    with contextlib.suppress(AttributeError):  # another torch may have no such class: traces then have no limit
        tracer = dynamo_tracer.InstructionTranslatorBase
        replace(tracer, "step", _step, "end a trace that takes longer than the run can afford", always=True)


def _in_eager() -> Any:
    """Return the answer to Dynamo that runs a frame in eager this once, with compiled code for frames that it calls."""
    return ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.DEFAULT, FrameAction.RUN_ONLY), apply_to_code=False
    )
