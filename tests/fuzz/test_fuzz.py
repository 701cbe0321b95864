"""A few of the fuzzer's trials, and the fuzzer itself: a planted fault is found, and shrunk."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from deepytorch.passes.unpad import rules
from deepytorch.passes.unpad.emit import Emitter
from tests.fuzz.compare import Note, differences
from tests.fuzz.grammar import BATCH, MODEL, Batch, Trial, draw, plainest
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


@pytest.mark.parametrize("index", range(5))
def test_random_models_train_as_eager_does(index: int) -> None:
    outcome = run(draw(5, index, cases=12))
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
