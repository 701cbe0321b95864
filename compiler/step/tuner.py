"""The choice among the forms of a region that is not packed, by the time of training steps.

[Note: Tuning]
Compiled code is not always faster than eager: of VGG-16 on a CPU it is slower, and faster than both is eager with
convolutions over images whose channels are innermost in memory. So each form that a region has is tried when it is
there, against the fastest form so far: steps are run in both in turns (`Trial`), and the slower form is dropped. Before
its first step a form is compared with eager on a batch of training: outputs, and gradients of all weights. A form that
differs by more than rounding is dropped.

One region of a process is on trial at a time, since the time of a step is that of all its regions. A step is the time
between two steps of an optimizer, per entry of the region's batch.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.compiled_step import CALLS_A_STEP, StepBoundary
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.trial import Trial
from deepytorch.fused_optimizers import fuse_for
from deepytorch.log import logger, once

_PATIENCE = 200  # steps for which a region waits for another one's trial, which may be called no longer


class Form(Protocol):
    """A form of a region. name: for reports."""

    name: str

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Advance its compilation; return whether a call with these inputs could run it now."""
        ...

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run a call."""
        ...


class Eager:
    """The region's own operators, one by one."""

    name = "eager"

    def __init__(self, eager: Callable[..., Any]) -> None:
        self._eager = eager

    def poll(self, inputs: Sequence[Any]) -> bool:
        return True

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return tuple(self._eager(*inputs))


class OperatorByOperator:
    """A rewritten graph that runs operator by operator. module: takes all inputs of the region."""

    def __init__(self, name: str, module: fx.GraphModule) -> None:
        self.name, self._module = name, module

    def poll(self, inputs: Sequence[Any]) -> bool:
        return True

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if torch.is_grad_enabled():
            fuse_for(inputs)
        return tuple(self._module.forward(*inputs))


class CompiledForm:
    """Compiled code, ready for second backwards: see `region.Padded`."""

    name = "compiled"

    def __init__(self, padded: Any) -> None:
        self._padded = padded

    def poll(self, inputs: Sequence[Any]) -> bool:
        return bool(self._padded.poll(inputs))

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return tuple(self._padded(inputs))


class Tuner:
    """The forms of one region, of which each call runs one: the fastest so far, or one on trial."""

    def __init__(self, eager: Eager, others: Sequence[Form], guard: Guard, record: RegionRecord) -> None:
        """Make the choice. others: forms to try against eager, in this order where several are there."""
        self._eager, self._best = eager, cast("Form", eager)
        self._waiting, self._ready = list(others), list[Form]()
        self._guard, self._record = guard, record
        self._challenger: Form | None = None
        self._trial = Trial()
        self._current: Form = eager
        self._boundary, self._began, self._waited, self._calls = StepBoundary(), 0.0, 0, 0
        self._paused, self._entries = BUDGET.paused, 0
        self._has_tried = False
        record.forms_untried = len(self._waiting)

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Begin a call: advance compilations, and choose its form. Return whether any form was tried so far."""
        for form in [each for each in self._waiting if each.poll(inputs)]:
            self._waiting.remove(form)
            self._ready.append(form)
        passed = self._boundary.passed()
        self._calls = 0 if passed else self._calls + 1
        if not torch.is_grad_enabled():
            self._current = self._best
        elif passed or not self._began or self._calls > CALLS_A_STEP:  # else torch does not know the optimizer
            self._begin_step(inputs)
        self._entries += _num_entries(inputs)
        return self._has_tried

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the call that began last."""
        self._record.route = self._current.name
        return self._current(inputs)

    def _begin_step(self, inputs: Sequence[Any]) -> None:
        now = time.perf_counter()
        if self._challenger is not None:
            is_clean = self._paused == BUDGET.paused and self._entries > 0
            self._trial.note((now - self._began) / self._entries if is_clean else None)
            if self._trial.is_over or not _is_on_trial(self):
                self._settle(self._challenger)
        if self._challenger is None and self._ready and self._may_try():
            self._try(self._ready.pop(0), inputs)
        self._record.forms_untried = len(self._waiting) + len(self._ready) + (self._challenger is not None)
        self._record.on_trial = "" if self._challenger is None else self._challenger.name
        self._current = self._best
        if self._challenger is not None and self._trial.challenges:
            self._current = self._challenger
        self._began, self._paused, self._entries = time.perf_counter(), BUDGET.paused, 0

    def _may_try(self) -> bool:
        self._waited += 1
        return _begin_trial(self, insists=self._waited > _PATIENCE)

    def _try(self, form: Form, inputs: Sequence[Any]) -> None:
        self._has_tried = True
        difference = self._guard.difference(self._eager, form, inputs)
        if difference is None:
            self._challenger, self._trial, self._waited = form, Trial(), 0
            return
        _end_trial(self)
        message = f"{self._record.name}: {form.name} differs from eager: {difference}"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s; it is not used", message)

    def _settle(self, challenger: Form) -> None:
        """End the trial, and keep the faster form."""
        if self._trial.is_over:
            best, gain = self._best.name, self._trial.gain
            outcome = "used from now on" if self._trial.is_won else "not used"
            self._record.trials.append(f"{challenger.name}: {gain:.2f} times as fast as {best}, {outcome}")
            logger.info("%s, %s", self._record.name, self._record.trials[-1])
            if self._trial.is_won:
                self._best = challenger
        else:  # another region took over, as this one was not called for long
            self._ready.append(challenger)
        self._challenger = None
        _end_trial(self)


def _num_entries(inputs: Sequence[Any]) -> int:
    """Return the entries of the batch: of all inputs that no gradient goes to."""
    return sum(each.numel() for each in inputs if isinstance(each, torch.Tensor) and not each.requires_grad)


_ON_TRIAL: list[weakref.ref[Tuner]] = []  # at most one


def _is_on_trial(tuner: Tuner) -> bool:
    return any(each() is tuner for each in _ON_TRIAL)


def _begin_trial(tuner: Tuner, *, insists: bool) -> bool:
    """Return whether a region may be on trial now. insists: even if another one is."""
    if not insists and any(each() is not None and each() is not tuner for each in _ON_TRIAL):
        return False
    _ON_TRIAL[:] = [weakref.ref(tuner)]
    return True


def _end_trial(tuner: Tuner) -> None:
    if _is_on_trial(tuner):
        _ON_TRIAL.clear()
