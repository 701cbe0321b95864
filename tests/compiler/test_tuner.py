"""The choice among forms of a region by the time of training steps, and the comparison that comes before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step import kept_choices
from deepytorch.compiler.step import tuner as tuner_module
from deepytorch.compiler.step import turns as turns_module
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.kept_choices import KeptChoice
from deepytorch.compiler.step.trial import Trial
from deepytorch.compiler.step.tuner import STRICT, CompiledForm, Eager, OperatorByOperator, Tuner


def run_trial(
    seconds: Callable[[bool, int], float | None], most: int = 100, rounds: int | None = None
) -> tuple[Trial, list[bool]]:
    """Run a trial to its end; return it, and which steps were the challenger's."""
    trial, turns = Trial(rounds), list[bool]()
    for step in range(most):
        if trial.is_over:
            break
        turns.append(trial.challenges)
        trial.note(seconds(trial.challenges, step))
    return trial, turns


def test_a_clearly_faster_challenger_wins_after_three_rounds() -> None:
    trial, turns = run_trial(lambda challenges, step: 0.8 if challenges else 1.0)
    assert trial.is_over
    assert trial.gain > 1.01
    assert trial.gain == pytest.approx(1.25)
    a, b = [False] * 3, [True] * 3
    assert turns == a + b + b + a + a + b


def test_a_trial_costs_what_steps_of_the_slower_way_took_longer() -> None:
    trial = Trial(3)
    assert trial.lost == 0.0
    while not trial.is_over:
        seconds = 3.0 if trial.challenges else 1.0
        trial.note(seconds / 8, seconds)
    assert trial.lost == pytest.approx(9 * 2.0)


def test_a_slower_challenger_loses() -> None:
    trial, turns = run_trial(lambda challenges, step: 1.1 if challenges else 1.0)
    assert trial.is_over
    assert trial.gain < 1.01
    assert len(turns) == 18


def test_a_difference_within_the_noise_takes_all_rounds_and_changes_nothing() -> None:
    trial, turns = run_trial(lambda challenges, step: 1.0 + 0.02 * (step % 3))
    assert trial.is_over
    assert trial.gain < 1.01
    assert len(turns) == 36


def test_a_machine_that_slows_down_does_not_decide() -> None:
    trial, _ = run_trial(lambda challenges, step: (0.9 if challenges else 1.0) * (1.0 + 0.01 * step))
    assert trial.gain > 1.01
    assert trial.gain == pytest.approx(1.11, abs=0.03)


def test_a_number_of_rounds_is_kept_however_clear_the_outcome() -> None:
    trial, turns = run_trial(lambda challenges, step: 0.5 if challenges else 1.0, rounds=4)
    assert len(turns) == 24
    assert trial.gain == pytest.approx(2.0)


def test_the_first_step_of_a_block_and_steps_with_a_pause_do_not_count() -> None:
    turns = iter(range(1000))

    def seconds(challenges: bool, step: int) -> float | None:
        return None if next(turns) % 5 == 4 else (0.5 if challenges else 1.0)

    trial, steps = run_trial(seconds)
    assert trial.gain == pytest.approx(2.0)
    assert len(steps) > 18
    slow_at_first = iter(itertools.cycle([9.0, 1.0, 1.0]))
    assert run_trial(lambda challenges, step: next(slow_at_first))[0].gain == pytest.approx(1.0)


# ---------------------------------------------------------------------- the choice


class Clock:
    """A clock that forms move on."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A form of a region that takes some seconds."""

    def __init__(self, name: str, seconds: float, clock: Clock, ready_at: int = 0, factor: float = 1.0) -> None:
        self.name, self.calls, self._polls, self.draws_alike = name, 0, 0, False
        self._seconds, self._clock, self._ready_at, self._factor = seconds, clock, ready_at, factor

    def poll(self, inputs: Sequence[Any]) -> bool:
        self._polls += 1
        return self._polls > self._ready_at

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.calls += 1
        self._clock.now += self._seconds
        return [(inputs[0] * inputs[1]).sum() * self._factor]


class CompiledTimed(Timed, CompiledForm):
    """The same, of compiled code."""


class Steps:
    """Steps of a script with one region and an optimizer."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, others: Callable[[Clock], list[Timed]], **settings: Any
    ) -> None:
        self.clock, self.record = Clock(), RegionRecord("region", "declined", "inductor")
        monkeypatch.setattr(tuner_module.time, "perf_counter", self.clock)
        monkeypatch.setattr("deepytorch.compiler.step.guard.has_room", lambda devices: True)
        self.others = others(self.clock)
        self.eager = Timed("eager", 1.0, self.clock)
        eager = Eager(lambda *inputs: self.eager(inputs))
        others_of = [eager if each is None else each for each in self.others]
        self.tuner = Tuner(eager, others_of, Guard(self.record), self.record, **settings)
        self.others = [each for each in self.others if each is not None]
        self.weight, self.batch = nn.Parameter(torch.ones(4)), torch.ones(4)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)

    def run(self, count: int, calls: int = 1) -> None:
        for _ in range(count):
            for _ in range(calls):
                inputs = (self.weight, self.batch)
                form = self.tuner if self.tuner.poll(inputs) else self.eager
                form(inputs)[0].backward()
            self.optimizer.step()

    def last(self) -> str:
        for each in (self.eager, *self.others):
            each.calls = 0
        self.run(5)
        [found] = [each.name for each in (self.eager, *self.others) if each.calls == 5]
        return found


def wrong_compiler(clock: Clock) -> list[Timed]:
    return [CompiledTimed("compiled", 0.5, clock, factor=1.01)]


def test_compiled_code_that_differs_is_tried_again_with_strict_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = kept()
    strict = CompiledTimed(STRICT, 0.5, Clock(), 3)
    steps = Steps(
        monkeypatch, lambda clock: [CompiledTimed("compiled", 0.5, clock, factor=1.01)], strict=strict, kept=choice
    )
    strict._clock = steps.clock
    steps.others.append(strict)
    steps.run(40)
    assert steps.last() == STRICT
    assert choice.read() == STRICT
    assert ["compiled differs" in each for each in steps.record.fallbacks] == [True]


def test_strict_numerics_that_differ_too_leave_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = CompiledTimed(STRICT, 0.5, Clock(), factor=1.01)
    steps = Steps(monkeypatch, wrong_compiler, strict=strict)
    strict._clock = steps.clock
    steps.run(20)
    assert steps.last() == "eager"
    assert len(steps.record.fallbacks) == 2


def test_the_fastest_form_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("channels last", 0.7, clock), Timed("compiled", 0.8, clock, 50)])
    steps.run(45)
    assert steps.last() == "channels last"
    steps.run(60)
    assert steps.last() == "channels last"
    assert steps.record.trials == [
        "channels last: 1.43 times as fast as eager, used from now on",
        "compiled: 0.88 times as fast as channels last, not used",
    ]
    # 9 steps of eager at 1.0 against 0.7, and then 9 of compiled code at 0.8
    assert steps.record.trial_seconds == pytest.approx(9 * 0.3 + 9 * 0.1)


def test_compiled_code_that_is_slower_than_eager_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 1.2, clock, 3)])
    steps.run(60)
    assert steps.last() == "eager"
    before = steps.clock.now
    steps.run(100)
    assert steps.clock.now - before == pytest.approx(100.0)


def test_parts_of_an_accumulated_step_run_in_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)])
    for _ in range(40):
        before = steps.eager.calls, steps.others[0].calls
        steps.run(1, calls=4)
        made = steps.eager.calls - before[0], steps.others[0].calls - before[1]
        assert 4 in made or sum(made) > 4  # more in the step with the comparison
    assert steps.last() == "compiled"


def test_calls_count_as_steps_where_torch_does_not_know_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)])
    steps.run(1, calls=310)
    assert steps.record.trials == ["compiled: 2.00 times as fast as eager, used from now on"]


def test_a_form_with_other_numbers_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock, factor=1.01)])
    steps.run(40)
    assert steps.others[0].calls == 1  # the comparison
    assert steps.last() == "eager"
    [message] = steps.record.fallbacks
    assert "compiled differs from eager: output 0 by 1.0e-02" in message


def test_one_region_is_on_trial_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)])
    record = RegionRecord("another", "declined", "inductor")
    other = Timed("compiled", 0.5, steps.clock)
    another = Tuner(Eager(lambda *inputs: steps.eager(inputs)), [other], Guard(record), record)
    for _ in range(5):
        steps.run(1)
        another.poll((steps.weight, steps.batch))
    assert other.calls == 0
    for _ in range(60):
        steps.run(1)
        inputs = (steps.weight, steps.batch)
        (another if another.poll(inputs) else steps.eager)(inputs)
    assert len(steps.record.trials) == len(record.trials) == 1


def test_a_region_that_is_called_no_longer_does_not_keep_others_from_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)])
    steps.run(3)
    left, steps.tuner = (
        steps.tuner,
        Tuner(
            Eager(lambda *inputs: steps.eager(inputs)),
            [Timed("compiled", 0.5, steps.clock)],
            Guard(steps.record),
            steps.record,
        ),
    )
    steps.run(300)
    assert len(steps.record.trials) == 1
    assert left is not steps.tuner


def test_compiled_code_that_runs_from_the_first_step_on_is_compared_and_challenged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for factor, outcome in ((1.0, "compiled"), (1.01, "eager")):
        first = Timed("compiled", 0.7, Clock(), factor=factor)
        steps = Steps(monkeypatch, lambda clock: [Timed("channels last", 0.9, clock), None], first=first)
        first._clock = steps.clock
        steps.others.append(first)
        steps.run(80)
        assert len(steps.record.fallbacks) == (factor != 1.0)
        assert steps.last() == ("channels last" if outcome == "eager" else outcome)


def test_a_form_is_compared_again_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)], verify_every=10)
    steps.run(60)
    assert steps.record.forms_compared > 3
    steps.others[0]._factor = 1.01
    steps.run(12)
    assert len(steps.record.fallbacks) == 1
    assert steps.last() == "eager"


# ---------------------------------------------------------------------- outcomes of earlier runs


def kept(text: str = "x + y", *settings: Any) -> KeptChoice:
    graph = fx.symbolic_trace(lambda x, y: x + y if text == "x + y" else x - y)
    return KeptChoice(graph, [torch.ones(2), 3], settings)


def test_an_outcome_is_for_its_graph_sizes_and_settings_alone() -> None:
    kept().write("channels last")
    assert kept().read() == "channels last"
    assert kept("x - y").read() is None
    assert kept("x + y", 2).read() is None
    with torch.autocast("cpu", torch.bfloat16):
        assert kept().read() is None
    kept().write("eager")
    assert kept().read() == "eager"


def test_an_outcome_that_is_old_or_broken_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept().write("compiled")
    monkeypatch.setattr("deepytorch.compiler.step.kept_choices._SECONDS", 0.0)
    assert kept().read() is None
    monkeypatch.setattr("deepytorch.compiler.step.kept_choices._SECONDS", 60.0)
    kept_choices.choices_file().write_text("{")
    assert kept().read() is None
    kept().write("compiled")
    assert kept().read() == "compiled"


def test_an_outcome_that_is_not_clear_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.98, clock)], kept=kept())
    steps.run(60)
    assert steps.last() == "compiled"
    assert kept().read() is None


@pytest.mark.parametrize(("fastest", "trials"), [("eager", 0), ("channels last", 1), ("compiled", 1)])
def test_a_later_run_tries_nothing(monkeypatch: pytest.MonkeyPatch, fastest: str, trials: int) -> None:
    seconds = {"channels last": 1.5, "compiled": 1.5, fastest: 0.5}

    def others(clock: Clock) -> list[Timed]:
        return [Timed(name, seconds[name], clock) for name in ("channels last", "compiled")]

    first = Steps(monkeypatch, others, kept=kept())
    first.run(100)
    assert first.last() == fastest
    later = Steps(monkeypatch, others, kept=kept())
    later.run(3)
    assert later.last() == fastest
    assert len(later.record.trials) == later.record.forms_compared == trials
    assert later.record.forms_untried == 0


def test_a_form_that_was_the_fastest_is_compared_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept().write("compiled")
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock, factor=1.01)], kept=kept())
    steps.run(3)
    assert len(steps.record.fallbacks) == 1
    assert steps.last() == "eager"


def test_a_model_in_many_pieces_is_not_on_trial_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(clock: Clock) -> list[Timed]:
        return [Timed("channels last", 0.5, clock), CompiledTimed("compiled", 2.0, clock, ready_at=20)]

    monkeypatch.setattr(turns_module, "_trials_begun", 12)
    steps = Steps(monkeypatch, others)
    steps.run(3)
    assert steps.last() == "eager"
    steps.run(20)
    assert steps.last() == "compiled"  # as without trials
    assert steps.record.trials == ["compiled: untried, used from now on"]
    monkeypatch.setattr(turns_module, "_trials_begun", 11)
    steps = Steps(monkeypatch, others)
    steps.run(40)
    assert steps.last() == "channels last"  # this one was tried
    assert len(steps.record.trials) == 1
    assert steps.record.forms_untried == 0


def test_a_form_that_lost_by_little_is_tried_once_more_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda clock: [Timed("channels last", 1.02, clock), Timed("compiled", 2.0, clock, 30)])
    steps.run(38)
    [first] = steps.record.trials
    assert first.startswith("channels last: 0.98")
    steps.others[0]._seconds = 0.8  # nothing disturbs it any more
    steps.run(60)
    assert [each.partition(":")[0] for each in steps.record.trials] == ["channels last", "compiled", "channels last"]
    assert steps.last() == "channels last"
    assert steps.record.forms_untried == 0


def test_a_call_inside_of_a_backward_has_the_form_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint makes it, in a script whose optimizer steps in the backward."""
    steps = Steps(monkeypatch, lambda clock: [Timed("compiled", 0.5, clock)])
    inputs, forms = (steps.weight, steps.batch), set[str]()
    for _ in range(30):
        form = steps.tuner if steps.tuner.poll(inputs) else steps.eager
        loss = form(inputs)[0] * 1.0
        forward = steps.tuner._current.name

        def repeat(gradient: torch.Tensor, forward: str = forward) -> None:
            steps.optimizer.step()
            steps.tuner.poll(inputs)
            forms.add(forward)
            assert steps.tuner._current.name == forward

        loss.register_hook(repeat)
        loss.backward()
    assert forms == {"eager", "compiled"}


def test_gradients_of_a_form_with_channels_last_have_the_layout_of_eager() -> None:
    graph = fx.Graph()
    images, weight = graph.placeholder("images"), graph.placeholder("weight")
    innermost = {"memory_format": torch.channels_last}
    laid_out = graph.call_function(torch.ops.aten.contiguous.default, (images,), innermost)
    graph.output((graph.call_function(torch.ops.aten.conv2d.default, (laid_out, weight)),))
    form = OperatorByOperator("channels last", fx.GraphModule(nn.Module(), graph))
    leaves = [torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)]
    by_the_script = [each.detach().contiguous(**innermost).requires_grad_() for each in leaves]  # type: ignore[arg-type]
    for inputs in (leaves, [each * 1.0 for each in leaves], by_the_script):
        [output] = form(inputs)
        for gradient, each in zip(torch.autograd.grad(output.sum(), inputs), inputs, strict=True):
            assert gradient.stride() == each.stride()
