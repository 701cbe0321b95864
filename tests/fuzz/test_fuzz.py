"""A few of the fuzzer's trials, and the fuzzer itself: a planted fault is found, and shrunk."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.compiler.dynamo import trace_gate
from deepytorch.compiler.step import kept_weights
from deepytorch.compiler.step.outputs import pending, replay
from deepytorch.passes.unpad import masks, rules
from deepytorch.passes.unpad.emit import Emitter
from tests.fuzz.compare import Note, differences
from tests.fuzz.grammar import BATCH, MODEL, Batch, Trial, draw, plainest, valid
from tests.fuzz.journal import Journal
from tests.fuzz.shrink import shrink
from tests.fuzz.source import script
from tests.fuzz.training import Outcome, run

PLAIN = Trial(0, 0, tuple((name, plainest(name)) for name in MODEL), (Batch(), Batch(positions=11, padding="left")))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # of a trial under DDP


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3, 4])
def test_random_models_train_as_eager_does(index: int) -> None:
    outcome = run(draw(5, index, cases=6))
    assert not outcome.is_find, outcome


def test_a_plain_model_is_packed_and_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(PLAIN)
    assert (outcome.kind, outcome.padded) == ("equal", 0)
    assert outcome.packed == 5

    def emit(self: rules.Norm, node: fx.Node, emitter: Emitter, entries: object) -> fx.Node:
        x = honest(self, node, emitter, entries)
        return emitter.call(torch.ops.aten.mul.Tensor, (x, 1 + 1e-7))

    honest = rules.Norm.emit
    monkeypatch.setattr(rules.Norm, "emit", emit)
    outcome = run(PLAIN)
    assert outcome.kind == "differs"
    assert outcome.wrong == [0, 1]


def of(look: str = "nothing", **choices: str) -> Trial:
    """The plain trial with other alternatives; most of its positions are pads."""
    kinds = [("mostly", 1234), ("left", 2345)]
    cases = tuple(Batch(4, 9, padding, look=look, varies=True, seed=seed) for padding, seed in kinds)
    return valid(Trial(0, 0, tuple((name, choices.get(name, plainest(name))) for name in MODEL), cases))


Plant = Callable[[pytest.MonkeyPatch], None]
aten = torch.ops.aten


@dataclass(frozen=True)
class Careless(rules.Pointwise):
    """Takes an operator that looks across positions to work token by token."""

    def admits(self, node: fx.Node, layouts: Any, from_batch: Any) -> bool:
        return True


def careless(*targets: Any) -> Plant:
    """Have operators run on packed tokens as they are."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for target in targets:
            patch.setitem(rules.RULES, target, Careless())

    return plant


def scaled_dropout(patch: pytest.MonkeyPatch) -> None:
    """Drop with half of the probability, as a packed step."""

    def emit(self: rules.Pointwise, node: fx.Node, emitter: Emitter, entries: Any) -> fx.Node:
        made = honest(self, node, emitter, entries)
        if made.target is aten.dropout.default:
            made.args = (made.args[0], made.args[1] / 2, made.args[2])  # type: ignore[operator]
        return made

    honest = rules.Pointwise.emit
    patch.setattr(rules.Pointwise, "emit", emit)


def gradient_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """Give a dropout's output the right values and a gradient that belongs to other draws."""

    def emit(self: rules.Pointwise, node: fx.Node, emitter: Emitter, entries: Any) -> fx.Node:
        made = honest(self, node, emitter, entries)
        if node.target is aten.dropout.default:
            other = honest(self, node, emitter, entries)
            values = emitter.call(aten.detach.default, (emitter.call(aten.sub.Tensor, (made, other)),))
            made = emitter.call(aten.add.Tensor, (other, values))
        return made

    honest = rules.Pointwise.emit
    patch.setattr(rules.Pointwise, "emit", emit)


def attention_without_dropout(patch: pytest.MonkeyPatch) -> None:
    honest = Emitter.attention

    def attention(self: Emitter, attention: Any, *others: Any) -> fx.Node:
        return honest(self, replace(attention, dropout_p=0.0), *others)

    patch.setattr(Emitter, "attention", attention)


def every_mask_is_causal(patch: pytest.MonkeyPatch) -> None:
    """Take each mask for a causal one of the keys that any query sees."""

    def of_scores(term: Any, value: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
        seen = honest(term, value, sizes)
        return seen.any(-2, keepdim=True) & torch.ones(sizes[1:], dtype=torch.bool).tril()

    honest = masks._of_scores
    patch.setattr(masks, "_of_scores", of_scores)


def hooks_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(patch=lambda **settings: contextlib.nullcontext())
    patch.setattr(trace_gate, "dynamo_config", settings)


def pads_are_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pending.Pending, "_without_gradients", lambda self: torch.zeros(self.shape, dtype=self.dtype))


def draws_of_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "generators_of", lambda devices: ())


def weights_of_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept_weights, "as_then", lambda past, place: past.inputs[place])


def factor_in_norms(patch: pytest.MonkeyPatch) -> None:
    def emit(self: rules.Norm, node: fx.Node, emitter: Emitter, entries: Any) -> fx.Node:
        return emitter.call(aten.mul.Tensor, (honest(self, node, emitter, entries), 1 + 1e-7))

    honest = rules.Norm.emit
    patch.setattr(rules.Norm, "emit", emit)


PLANTED: list[tuple[Trial, Plant]] = [
    (of(random="dropout of words"), gradient_of_its_own),
    (of("log: mean", random="noise", place="outside"), draws_of_now),
    (of("log: mean", place="outside"), pads_are_zero),
    (of(random="dropout"), scaled_dropout),
    (of(random="dropout of attention"), attention_without_dropout),
    (of("tokens, after the step"), weights_of_now),
    (of(hooks="midway: forward hook on a block", host="import"), hooks_are_not_looked_for),
    *((of(reach=name), every_mask_is_causal) for name in ("documents", "windows by head", "every second")),
    (of(reach="prefix of each row"), every_mask_is_causal),
    (of(mixer="learned token shift"), careless(aten.pad.default)),
    (of(mixer="running sum of tokens", mixer_place="behind the blocks"), careless(aten.cumsum.default)),
    (of(feed="experts of limited room"), careless(aten.cumsum.default, aten.einsum.default)),
    (of(loss="preferences"), factor_in_norms),
    (of(layers="one, twice"), factor_in_norms),
    (of(wrapped="DDP"), factor_in_norms),
]


@pytest.mark.parametrize(
    ("trial", "plant"),
    [pytest.param(*each, marks=[] if number < 3 else [pytest.mark.slow]) for number, each in enumerate(PLANTED)],
)
def test_each_part_of_the_grammar_notices_a_fault_in_it(
    trial: Trial, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run(trial)
    assert not outcome.is_find, outcome
    plant(monkeypatch)
    assert run(trial).is_find


def test_a_case_that_ruins_an_optimizers_state_does_not_show_in_the_next() -> None:
    ruins = of(spelling="filled with infinity", second_side="cross attention", loss="row: mean", optimizer="adamw")
    empty = replace(ruins.cases[0], padding="empty row")
    outcome = run(replace(ruins, cases=(empty, *ruins.cases)))
    assert not outcome.is_find, outcome
    assert outcome.packed > 0


def test_what_fails_is_shrunk_to_what_makes_it_fail() -> None:
    def failing(trial: Trial) -> Outcome:
        wrong = [n for n, case in enumerate(trial.cases) if case.padding == "left" and trial.feed == "gated"]
        return Outcome("differs" if wrong else "equal", wrong=wrong)

    trial = next(each for each in (draw(0, index) for index in range(100)) if failing(each).wrong)
    shrunk, outcome = shrink(trial, failing(trial), run=failing)
    assert outcome.kind == "differs"
    assert dict(shrunk.choices) == {**dict(PLAIN.choices), "feed": "gated"}
    assert [replace(case, seed=0) for case in shrunk.cases] == [
        Batch(rows=2, positions=min(4, shrunk.cases[0].positions), padding="left")
    ]


def test_each_alternative_is_written_as_python() -> None:
    """Drawn at random, a rare one would be seen by nobody for long."""
    for table in (MODEL, BATCH):
        for name, alternatives in table.items():
            for value in alternatives:
                trial = (
                    PLAIN.with_choice(name, value)
                    if name in MODEL
                    else replace(PLAIN, cases=(replace(Batch(), **{name: value}),))
                )
                ast.parse(script(trial))


def test_some_alternatives_may_be_asked_for() -> None:
    among = {"random": ["dropout", "noise"], "host": ["import"]}
    drawn = [draw(0, index, 96, among) for index in range(20)]
    assert {trial.random for trial in drawn} == {"dropout", "noise"}
    assert {trial.host for trial in drawn} == {"import"}
    assert {len(trial.cases) for trial in drawn} == {32}  # each case of these is several calls


def test_a_trial_is_the_same_whenever_it_is_drawn() -> None:
    assert draw(3, 14) == draw(3, 14)
    assert draw(3, 14) != draw(3, 15)
    assert Trial.from_json(draw(3, 14).to_json()) == draw(3, 14)


def notes(*values: torch.Tensor | None) -> list[Note]:
    names = ("step 0: loss", "step 0: gradient: w", "step 1: loss")
    return [(0, name, value) for name, value in zip(names, values, strict=True)]


def test_what_counts_as_a_difference() -> None:
    one, nan = torch.ones(3, dtype=torch.float64), torch.full((3,), torch.nan, dtype=torch.float64)

    def told(wanted: list[Note], found: list[Note], trial: Trial = PLAIN) -> list[str]:
        return [each.text.split(":")[1].strip() for each in differences(trial, wanted, found)]

    assert told(notes(one, one, one), notes(one, one, one)) == []
    assert told(notes(one, one, one), notes(one, one * (1 + 1e-8), one)) == ["gradient"]
    assert told(notes(one, one, one), notes(one, None, one)) == ["gradient"]
    assert told(notes(one, None, one), notes(one, one * 0, one)) == ["gradient"]
    assert told(notes(one, one, one), notes(one, one, one.float())) == ["loss"]
    assert told(notes(one, nan, nan), notes(one, nan, one)) == []  # weights are ruined
    assert told(notes(one, nan, nan), notes(one, one, one)) == ["gradient"]
    assert told(notes(one, one, one), notes(one, one, nan)) == ["loss"]
    several = [(0, "loss over draws", torch.tensor(each)) for each in ([1.0, 0.1], [1.5, 0.1], [2.0, 0.1])]
    assert list(differences(PLAIN, several[:1], several[1:2])) == []
    assert len(list(differences(PLAIN, several[:1], several[2:]))) == 1
    half, big = PLAIN.with_choice("dtype", "bfloat16"), torch.ones(300)
    gradients = [[(0, "step 0: gradient: w", big * each)] for each in (1.0, 1.001, 0.999, 0.99)]
    assert list(differences(half, gradients[1], gradients[2], exact=gradients[0])) == []
    assert len(list(differences(half, gradients[1], gradients[3], exact=gradients[0]))) == 1
    rough = PLAIN.with_choice("dtype", "float32")
    assert told(notes(one, one, one), notes(one, one * (1 + 1e-5), one), rough) == []
    assert told(notes(one, one, one), notes(one, one * (1 + 1e-3), one), rough) == ["gradient"]
    wanted, found = notes(one, one, one), notes(one, one, one * 1.01)
    assert list(differences(PLAIN, wanted, found, moved=[notes(one, one, one * 1.002)])) == []


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 3)
    journal.add(draw(3, 0, 2), Outcome("equal", cases=2, packed=4, padded=2))
    journal.add(draw(3, 1, 2), Outcome("differs", ["case 0"], cases=2, wrong=[0]))
    again = Journal(path, 3)
    assert again.next_index() == 2
    assert again.finds() == [draw(3, 1, 2)]
    again.add(draw(3, 1, 2), Outcome("equal", cases=2))  # mended
    summary = Journal(path, 3).summary()
    assert (summary["trials"], summary["cases"], summary["silent_differences"]) == (2, 4, 0)
    assert summary["share_of_steps_packed"] == 0.667
    assert Journal(path, 4).next_index() == 0
