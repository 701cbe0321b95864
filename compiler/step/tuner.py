"""The choice among the forms of a region that is not packed, by the time of training steps.

[Note: Tuning]
Compiled code is not always faster than eager: of VGG-16 on a CPU it is slower, and faster than both is eager with
convolutions over images whose channels are innermost in memory. So each form that a region has is tried when it is
there, against the fastest form so far: steps are run in both in turns (`Trial`), and the slower form is dropped. Before
its first step a form is compared with eager on a batch of training: outputs, and gradients of all weights. A form that
differs by more than rounding is dropped.

One region of a process is on trial at a time, since the time of a step is that of all its regions. A step is the time
between two steps of an optimizer, per entry of the region's batch. Ranks that train together try the same form in the
same steps, see [Note: Trials among ranks]. A clear outcome is kept on disk, and a later run of the same region
needs no trial; the comparison with eager is made in each run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.compiled_step import CALLS_A_STEP, StepBoundary
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.kept_choices import KeptChoice
from deepytorch.compiler.step.layouts import with_ordered_gradients
from deepytorch.compiler.step.trial import Trial
from deepytorch.compiler.step.turns import AmongRanks, OneProcess
from deepytorch.fused_optimizers import fuse_for
from deepytorch.log import logger, once
from deepytorch.torch_internals import current_graph_task_id

_GAIN = 0.01  # the least share of a step's time that a form has to save to replace another one
STRICT = "compiled with strict numerics"  # the name of a form, see [Note: Ladder]
_NEAR = 0.9  # a form that lost, but not by more, is tried once more when all others were: a compile process disturbs
_ROUNDS_AMONG_RANKS = 4


class Form(Protocol):
    """A form of a region. name: for reports. draws_alike: whether it draws the random numbers of eager."""

    name: str
    draws_alike: bool

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Advance its compilation; return whether a call with these inputs could run it now."""
        ...

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run a call."""
        ...


class Eager:
    """The region's own operators, one by one."""

    name, draws_alike = "eager", True

    def __init__(self, eager: Callable[..., Any]) -> None:
        self._eager = eager

    def poll(self, inputs: Sequence[Any]) -> bool:
        return True

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return tuple(self._eager(*inputs))


class OperatorByOperator:
    """A rewritten graph that runs operator by operator. module: takes all inputs of the region."""

    draws_alike = True

    def __init__(self, name: str, module: fx.GraphModule) -> None:
        self.name, self._module = name, module

    def poll(self, inputs: Sequence[Any]) -> bool:
        return True

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return tuple(self._module.forward(*inputs))
        fuse_for(inputs)
        return tuple(self._module.forward(*with_ordered_gradients(inputs)))


class CompiledForm:
    """Compiled code, ready for second backwards: see `region.Padded`."""

    draws_alike = False

    def __init__(self, padded: Any, name: str = "compiled") -> None:
        self._padded, self.name = padded, name

    def poll(self, inputs: Sequence[Any]) -> bool:
        return bool(self._padded.poll(inputs))

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return tuple(self._padded(inputs))


class Tuner:
    """The forms of one region, of which each call runs one: the fastest so far, or one on trial.

    Args:
        eager: The form that others are compared with.
        others: The forms to try, in this order where several are there; all but `first`.
        guard: The comparison with eager.
        record: The region's record in the report.
        turns: The time of each trial.
        first: The form to begin with; None: eager.
        kept: The outcome of earlier runs.
        verify_every: One of so many steps in a form other than eager is compared with eager; None: the first one only.
        strict: The form to try in place of compiled code that differs from eager; None if there is none.
    """

    def __init__(
        self,
        eager: Eager,
        others: Sequence[Form],
        guard: Guard,
        record: RegionRecord,
        turns: OneProcess | None = None,
        first: Form | None = None,
        kept: KeptChoice | None = None,
        verify_every: int | None = None,
        strict: CompiledForm | None = None,
    ) -> None:
        self._strict = strict
        self._eager, self._best = eager, first or eager
        self._waiting, self._ready, self._again = list(others), list[Form](), list[Form]()
        self._guard, self._record, self._verify_every = guard, record, verify_every
        self._turns = OneProcess() if turns is None else turns
        self._among_ranks = isinstance(self._turns, AmongRanks)
        self._challenger: Form | None = None
        self._trial = Trial()
        self._current = self._best
        self._boundary, self._began, self._calls = StepBoundary(), 0.0, 0
        self._paused, self._entries = BUDGET.paused, 0
        self._has_tried = first is not None
        self._steps_of_best, self._is_clear = 0, True
        self._retried: set[str] = set()  # names of forms that were tried once more, or are to be
        self._kept, self._known = kept, self._known_from(kept)
        record.forms_untried = len(self._waiting)

    def _known_from(self, kept: KeptChoice | None) -> str | None:
        """Return the fastest form as an earlier run has found it, and leave out others; None if it has to be found."""
        known = kept.read() if kept is not None else None
        if known == self._best.name and not self._among_ranks:
            self._waiting.clear()
        elif known is None or all(each.name != known for each in self._waiting):
            return None
        elif not self._among_ranks:
            self._waiting = [each for each in self._waiting if each.name == known]
        return known

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Begin a call: advance compilations, and choose its form. Return whether it may be another one than eager.

        A call inside of a backward, which a checkpoint makes, has the form of the forward that it repeats: an optimizer
        may have stepped in that backward already.
        """
        if self._began and current_graph_task_id() != -1:
            return self._has_tried
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
        self._turns.step_begins()
        self._verify(inputs)
        if self._challenger is not None:
            self._go_on(self._challenger, now)
        if self._challenger is None and not (self._waiting or self._ready):
            self._ready, self._again = self._again, []
        if self._challenger is None and self._ready:
            self._begin_turn(inputs)
        untried = len(self._waiting) + len(self._ready) + len(self._again)
        self._record.forms_untried = untried + (self._challenger is not None)
        self._record.on_trial = "" if self._challenger is None else self._challenger.name
        self._current = self._best
        if self._challenger is not None and self._trial.challenges:
            self._current = self._challenger
        self._began, self._paused, self._entries = time.perf_counter(), BUDGET.paused, 0

    def _go_on(self, challenger: Form, now: float) -> None:
        """Note the step that is over, of a trial; end the trial if it was the last one."""
        if not self._trial.is_over:
            is_clean = self._paused == BUDGET.paused and self._entries > 0
            took = now - self._began
            seconds = took / max(self._entries, 1)
            self._trial.note(seconds if is_clean or self._among_ranks else None, took)
        if self._trial.is_over:
            gain = self._turns.agreed(self._trial.gain)
            if gain is not None:
                self._settle(challenger, gain)
        elif not self._turns.is_on:  # another region took over, as this one was not called for long
            self._ready.append(challenger)
            self._challenger = None

    def _begin_turn(self, inputs: Sequence[Any]) -> None:
        turn = self._turns.next_form([each.name for each in self._ready], self._known)
        if turn is None:
            if self._turns.has_given_up:
                self._give_up(inputs)
            return
        form = next(each for each in self._ready if each.name == turn.form)
        if turn.is_known:
            self._use_untried([form], inputs, "the fastest in an earlier run")
            self._turns.end()
            return
        self._ready.remove(form)
        if self._agrees(form, inputs):
            self._challenger, self._trial = form, Trial(_ROUNDS_AMONG_RANKS if self._among_ranks else None)
        else:
            self._turns.agreed(0.0)  # other ranks are told that this one gains nothing
            self._turns.end()
            self._keep_outcome()

    def _give_up(self, inputs: Sequence[Any]) -> None:
        """Try no form any more: compiled code runs once it is there, unless a trial has found a form to be faster."""
        is_open = self._best is self._eager
        waiting = [each for each in self._waiting if is_open and isinstance(each, CompiledForm)]
        ready = [each for each in self._ready if is_open and isinstance(each, CompiledForm)]
        self._use_untried(ready, inputs, "untried")
        self._waiting += waiting

    def _use_untried(self, forms: Sequence[Form], inputs: Sequence[Any], why: str) -> None:
        """Use one of the forms without a trial, if there is one that agrees with eager, and try none any more."""
        self._ready.clear()
        self._waiting.clear()
        self._again.clear()
        for form in forms:
            if self._agrees(form, inputs):
                self._record.trials.append(f"{form.name}: {why}, used from now on")
                self._best = form

    def _agrees(self, form: Form, inputs: Sequence[Any]) -> bool:
        """Return whether a form agrees with eager on this batch; report it if it does not."""
        self._has_tried = True
        difference = self._guard.difference(self._eager, form, inputs)
        if not difference:
            return True
        message = f"{self._record.name}: {form.name} differs from eager: {difference}"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s; it is not used", message)
        if self._strict is not None and isinstance(form, CompiledForm):
            self._waiting.append(self._strict)
            self._strict = None
        return False

    def _verify(self, inputs: Sequence[Any]) -> None:
        """Compare the form in use with eager: in its first step if it had no turn, later on if that is asked for."""
        if self._best is self._eager or self._challenger is not None:
            return
        is_first = not self._began  # the form to begin with; others were compared before their turn
        self._steps_of_best += 1
        is_due = self._verify_every is not None and self._steps_of_best % self._verify_every == 0
        if (is_first or is_due) and not self._agrees(self._best, inputs):
            self._best = self._eager

    def _settle(self, challenger: Form, gain: float) -> None:
        """End the trial, and keep the faster form."""
        is_won = gain > 1.0 + _GAIN
        outcome = "used from now on" if is_won else "not used"
        self._record.trials.append(f"{challenger.name}: {gain:.2f} times as fast as {self._best.name}, {outcome}")
        logger.info("%s, %s", self._record.name, self._record.trials[-1])
        if is_won:
            self._best, self._steps_of_best = challenger, 0
        elif gain > _NEAR and challenger.name not in self._retried:
            self._retried.add(challenger.name)
            self._again.append(challenger)
        self._is_clear = self._is_clear and self._trial.is_clear
        self._record.trial_seconds += self._trial.lost
        self._challenger = None
        self._turns.end()
        self._keep_outcome()

    def _keep_outcome(self) -> None:
        """Keep the form for later runs, if the trials of all forms came out clearly: else these try again."""
        is_over = not (self._waiting or self._ready or self._again)
        if self._kept is not None and self._is_clear and is_over:
            self._kept.write(self._best.name)


def _num_entries(inputs: Sequence[Any]) -> int:
    """Return the entries of the batch: of all inputs that no gradient goes to."""
    return sum(each.numel() for each in inputs if isinstance(each, torch.Tensor) and not each.requires_grad)
