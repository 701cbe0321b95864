"""The recorder of a process that trains: a record of each step, and the trace of a few of them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.report import LEDGER
from deepytorch.config import Environment
from deepytorch.log import logger
from deepytorch.patches import listen
from deepytorch.profile.clock import Clock, Mark, Scope, parts_of
from deepytorch.profile.places import Places
from deepytorch.profile.records import OPTIMIZER, Job, Part, Rank, Step
from deepytorch.torch_internals import current_graph_task_id

STEADY = 3  # settled steps before the trace begins
_REPORTS = 32  # steps between two reports that are written


def attach() -> None:
    """Begin to record, in a process that `deepytorch profile` has started. Called when torch has been imported."""
    folder = Environment.read().profile
    if folder is None:
        return
    try:
        job = Job.read(Path(folder))
    except (OSError, ValueError) as error:
        logger.warning("this process is not profiled: the settings in DEEPYTORCH_PROFILE cannot be read (%s)", error)
        return
    Recorder(job).attach()


class Recorder:
    """The recorder of one process."""

    def __init__(self, job: Job) -> None:
        self._job, self._pid, self._thread = job, os.getpid(), threading.get_ident()
        self.clock, self.rank = Clock(), Rank()
        self.is_settled, self.positions, self.pads, self.pads_computed = True, 0, 0, 0  # of the step under way
        self.backwards = 0  # since the last step
        self._optimizer, self._stepping = Scope(Part(OPTIMIZER, "step")), list[Optimizer]()
        self._held: tuple[Step, list[list[Mark]]] | None = None  # the last step, which another optimizer may go on with
        self._number = self._steady = 0
        self._tracer: Any = None
        self._range: Any = None  # of the step, in the trace
        self._has_traced, self._last = False, 0  # the last step of the trace
        self._paused = BUDGET.paused  # at the end of the last step

    def attach(self) -> None:
        """Put scopes around everything in `Places`, and listen to optimizers."""
        Places(self).attach()
        why = "see where a step of the script's ends (deepytorch profile)"
        listen(register_optimizer_step_pre_hook, self._before_step, why, lambda: None)
        listen(register_optimizer_step_post_hook, self._after_step, why, lambda: None)
        atexit.register(self.finish)

    def is_here(self) -> bool:
        """Return whether this is the thread that trains, or one that runs its backward."""
        return os.getpid() == self._pid and (threading.get_ident() == self._thread or current_graph_task_id() != -1)

    @contextlib.contextmanager
    def inside(self, scope: Scope, name: str) -> Iterator[None]:
        """Count the time of the block for a scope, and show the block in the trace by this name."""
        if self._job.first == 1 and not self._number and self._tracer is None:
            self._trace_if_due()
        self.clock.enter(scope)
        shown = None
        if self._tracer is not None and name:
            shown = torch.profiler.record_function(f"deepytorch: {name}")
            shown.__enter__()
        try:
            yield
        finally:
            if shown is not None:
                shown.__exit__(None, None, None)
            self.clock.leave(scope)

    def saw_batch(self, positions: int, pads: int, *, packed: bool) -> None:
        """Note a batch of a call: how many of its positions are pads, and whether they were left out."""
        self.positions, self.pads = self.positions + positions, self.pads + pads
        self.pads_computed += 0 if packed else pads

    # ------------------------------------------------------------------ steps

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        if optimizer in self._stepping:  # an earlier step of this optimizer has raised
            del self._stepping[self._stepping.index(optimizer) :]
            self.clock.leave(self._optimizer)
        if not self._stepping:
            self._thread = threading.get_ident()
            self.clock.enter(self._optimizer)
        self._stepping.append(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid or optimizer not in self._stepping:
            return
        del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping:  # an inner optimizer: the outer one's step counts
            return
        self.clock.leave(self._optimizer)
        self._end_step(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        marks = self.clock.cut()
        if self._held is not None and not self.backwards:  # one more optimizer, of the same backward
            self._held[1].append(marks)
        else:
            self._flush()
            self._number += 1
            self.is_settled, self._paused = self.is_settled and self._paused == BUDGET.paused, BUDGET.paused
            self._steady = self._steady + 1 if self.is_settled and self._number > 1 else 0
            step = Step(
                self._number, {}, (), self.is_settled, self._tracer is not None,
                self.positions, self.pads, self.pads_computed,
            )  # fmt: skip
            self._held = step, [marks]
            if self._number == 1:
                self._see(optimizer)
            self._trace_if_due()
            if self._job.stop_after is not None and self._number >= self._job.stop_after:
                raise SystemExit(0)
        self.is_settled, self.positions, self.pads, self.pads_computed = True, 0, 0, 0
        self.backwards = 0
        self.clock.begin()

    def _see(self, optimizer: Optimizer) -> None:
        """Note what is known from the first step on."""
        rank = self.rank
        trained = next((each for group in optimizer.param_groups for each in group["params"]), None)
        rank.device = "cpu" if trained is None else trained.device.type
        rank.host, rank.rank = socket.gethostname(), int(os.environ.get("RANK", "0"))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank.rank = torch.distributed.get_rank()
        rank.optimizer, rank.fused = type(optimizer).__name__, bool(optimizer.defaults.get("fused"))
        if rank.device == "cuda":
            self._flush()
            self.clock.on_device = True

    # ------------------------------------------------------------------ records

    def _flush(self) -> None:
        """Write the last step."""
        if self._held is None:
            return
        (step, cuts), self._held = self._held, None
        for marks in cuts:
            parts, waits = parts_of(marks)
            step.waits = [*step.waits, *waits]
            for part, seconds in parts.items():
                step.parts[part] = step.parts.get(part, 0.0) + seconds
        self._write("step", **step.to_json())
        if step.number % _REPORTS == 0 or step.number in (1, STEADY + 1):
            self._write_report()

    def _write_report(self) -> None:
        known = {name: value for name, value in vars(self.rank).items() if name not in ("steps", "trace")}
        self._write("rank", **{**known, "report": LEDGER.report().to_json()})

    def _write(self, kind: str, **values: Any) -> None:
        # A full disk, or a command that is over: training goes on.
        with contextlib.suppress(OSError), self._file(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def _file(self, suffix: str) -> Path:
        return self._job.folder / f"{self._pid}{suffix}"

    def finish(self) -> None:
        """Write what is not yet written, at the end of the process."""
        if os.getpid() != self._pid or not self._number:
            return
        self._end_trace()
        self._flush()
        self._write_report()

    # ------------------------------------------------------------------ the trace

    def _trace_if_due(self) -> None:
        """Begin or end the trace, between two steps."""
        job, number = self._job, self._number
        if self._tracer is not None:
            self._range.__exit__(None, None, None)
            if number >= self._last:
                self._end_trace()
            else:
                self._begin_range()
        elif not self._has_traced and (self._steady >= STEADY if job.first is None else number + 1 == job.first):
            self._last = number + job.num_traced
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.clock.on_device:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._tracer = torch.profiler.profile(activities=activities)
            self._tracer.start()
            self._begin_range()

    def _begin_range(self) -> None:
        self._range = torch.profiler.record_function(f"step {self._number + 1}")
        self._range.__enter__()

    def _end_trace(self) -> None:
        if self._tracer is None:
            return
        tracer, self._tracer, self._has_traced = self._tracer, None, True
        try:
            tracer.stop()
            tracer.export_chrome_trace(str(self._file(".trace")))
        except (OSError, RuntimeError) as error:
            logger.warning("the trace could not be written: %s", error)
