"""Which frames Dynamo traces, and when: what stands between its frame evaluation and its tracer.

Dynamo asks for a trace of each frame that it has no code for: at the first call, after a graph break, and when a guard
fails because the script has changed something. A trace takes seconds, and training waits. So the gate lets a frame be
traced only where the run can afford it (see [Note: What a pause may cost]); else that frame runs in eager, as Python
has it, and what it calls runs what is compiled already. Whatever goes wrong in a trace has the same end.

What a trace takes is known behind it. So one that goes on for longer than the run can afford is ended, and is thought
to take twice as long the next time.

A frame is also left to eager where its graph would not be the module run as it is, or could only be compiled in the
training process and the run is too short to pay for that: the backend says so (`Trace.leave`).
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
_OF_PAUSE = 0.9  # in which a trace is over; it takes some time to clean up behind one that was ended


@dataclass
class TracedCode:
    """What is known of one code object that was traced, or was to be.

    seconds: of its last trace. extra_seconds: what compiling it in this process is thought to take; infinite where it
    is to stay in eager. sizes: those of batches for which its graphs came out with fixed sizes.
    """

    seconds: float | None = None
    extra_seconds: float = 0.0
    sizes: set[Any] = field(default_factory=set)

    def is_fixed(self) -> bool:
        """Return whether each new size would be traced anew: two traces came out for the sizes of their batches."""
        return len(self.sizes) > 1


@dataclass
class TraceHistory:
    """What tracing the modules of one class has shown.

    first_seconds: what the first trace is thought to take. granted: whether the next frame may be traced whatever it
    costs, as ranks have agreed to trace in the same step. packs_in_eager: whether packed steps that are not compiled
    were no slower than padded ones.
    """

    first_seconds: float = 0.0
    granted: bool = False
    packs_in_eager: bool = True
    codes: dict[CodeType, TracedCode] = field(default_factory=dict)

    def of(self, code: CodeType) -> TracedCode:
        """Return what is known of a code object."""
        return self.codes.setdefault(code, TracedCode())

    def expected_seconds(self, code: CodeType) -> float:
        """Return what the next trace of a code object is thought to take, with what compiling it adds."""
        known = self.of(code)
        if known.is_fixed():
            return _NEVER
        longest = max((each.seconds for each in self.codes.values() if each.seconds is not None), default=None)
        seconds = known.seconds if known.seconds is not None else longest
        return (self.first_seconds if seconds is None else seconds) + known.extra_seconds


class LeftToEager(Exception):
    """The frame that is traced is to run in eager, as Python has it."""


@dataclass
class Trace:
    """One frame while Dynamo traces it and the backend compiles its graph.

    in_place: whether its graph may be compiled in this process where no other one can. packs_in_eager: as
    `TraceHistory` has it. deadline: of `perf_counter`, behind which it is ended.
    """

    code: TracedCode
    in_place: bool
    packs_in_eager: bool
    deadline: float = _NEVER
    is_too_long: bool = False
    reason: str | None = None  # why it is left to eager

    def is_traced(self) -> None:
        """Let what is compiled of the graph in this process end, traces of its own with it: that was affordable."""
        self.deadline = _NEVER

    def leave(self, reason: str, extra_seconds: float = _NEVER) -> NoReturn:
        """Leave the frame to eager. extra_seconds: what a run has to afford, beside the trace, to try once more."""
        self.reason, self.code.extra_seconds = reason, extra_seconds
        raise LeftToEager(reason)


_CURRENT: ContextVar[Trace | None] = ContextVar("deepytorch_trace", default=None)


def current_trace() -> Trace | None:
    """Return the trace of which this is a part; None for a graph that `torch.compile` was asked for by name."""
    return _CURRENT.get()


class TraceGate:
    """Stands for Dynamo's callback of a compiled function.

    traces: Dynamo's own callback. waits: whether training waits for every trace, as `torch.compile` has it.
    """

    def __init__(self, traces: Callable[..., Any], name: str, history: TraceHistory, waits: bool) -> None:
        self._torchdynamo_orig_backend = traces  # by this name Dynamo looks for the backend behind a callback
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
            # Hooks that come or go later are seen, where Dynamo would take them for what they were; and numbers that a
            # forward draws from NumPy stay NumPy's, where Dynamo would draw them from torch's generator.
            as_eager = dynamo_config.patch(skip_nnmodule_hook_guards=False, use_numpy_random_stream=True)
            with BUDGET.pause(), as_eager:
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
            return ConvertFrameReturn()  # it is not traced again; the frames that it calls may be
        finally:
            _CURRENT.reset(token)
            known.seconds = factor * (time.perf_counter() - started)

    def _longest(self) -> float:
        """Seconds that a trace may take: no matter how many where ranks have agreed on it, as it takes them all."""
        among_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        return _NEVER if self._waits or among_ranks else _OF_PAUSE * BUDGET.longest_pause()

    def _may_trace(self, code: CodeType, known: TracedCode) -> bool:
        if known.extra_seconds == _NEVER:
            return False
        granted, self._history.granted = self._history.granted, False
        if not self._waits and current_graph_task_id() != -1:  # what a checkpoint computes again runs as it ran first
            return False
        return self._waits or granted or BUDGET.affords(self._history.expected_seconds(code))

    def _tell(self, reason: str) -> None:
        once(logging.INFO, "a part of %s runs in eager: %s", self._name, reason)
        if reason not in self._told:
            self._told.add(reason)
            LEDGER.open(RegionRecord(f"a part of {self._name}", "eager", "", declined=[reason]))


def end_if_too_long() -> None:
    """End the trace of which this is a part if the run cannot afford any more of it."""
    trace = _CURRENT.get()
    if trace is not None and time.perf_counter() > trace.deadline:
        trace.is_too_long = True
        raise LeftToEager("the trace takes longer than the run can afford")


def _step(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Dynamo's tracing of one instruction, but for traces that are to end."""

    def step(translator: Any) -> bool:
        end_if_too_long()
        return original(translator)

    return step


def watch_traces() -> None:
    """Have Dynamo's tracer ask before each instruction whether there is time for it."""
    with contextlib.suppress(AttributeError):  # of a torch that is made otherwise: a trace takes what it takes
        tracer = dynamo_tracer.InstructionTranslatorBase
        replace(tracer, "step", _step, "end a trace that takes longer than the run can afford", always=True)


def _in_eager() -> Any:
    """Return what has Dynamo run a frame as it is, this time, with what is compiled of the frames that it calls."""
    return ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.DEFAULT, FrameAction.RUN_ONLY), apply_to_code=False
    )
