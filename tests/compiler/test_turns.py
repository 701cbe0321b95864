"""Ranks try the same form in the same steps, and agree on its outcome: see [Note: Trials among ranks]."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from deepytorch.compiler.step import turns as turns_module
from deepytorch.compiler.step.turns import AmongRanks, OneProcess, Turn


class Rank:
    """One rank's side of a region: it tries what it is told to, for `LASTS` steps, and measures `gains`."""

    LASTS = 6

    def __init__(self, store: dist.Store, rank: int, size: int, gains: dict[str, float], known: str | None) -> None:
        self.turns, self.gains, self.known = AmongRanks(store, rank, size, "region"), gains, known
        self.slot: list[object] = []  # each rank is a process of its own
        self.ready: list[str] = []
        self.ran: list[str] = []  # what each step ran
        self.used: list[tuple[str, float]] = []
        self._turn: Turn | None = None
        self._left = 0

    def step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(turns_module, "_ON_TRIAL", self.slot)
        self.turns.step_begins()
        if self._turn is not None and self._left == 0:
            gain = self.turns.agreed(self.gains[self._turn.form])
            if gain is not None:
                self.used.append((self._turn.form, gain))
                self._turn = None
                self.turns.end()
        if self._turn is None and self.ready:
            self._turn = self.turns.next_form(self.ready, self.known)
            if self._turn is not None:
                self.ready.remove(self._turn.form)
                self._left = self.LASTS
                if self._turn.is_known:
                    self.used.append((self._turn.form, 9.0))
                    self.ready.clear()
                    self._turn = None
                    self.turns.end()
        self.ran.append(self._turn.form if self._turn is not None and self._left else "")
        self._left = max(self._left - 1, 0)


def group(*gains: dict[str, float], known: Sequence[str | None] = (None, None, None)) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, len(gains), each, known[rank]) for rank, each in enumerate(gains)]


def run(ranks: list[Rank], steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps. The first rank to begin a step is another one each time, and each may be first to end it."""
    for step in range(steps):
        for place in range(len(ranks)):
            ranks[(step + place) % len(ranks)].step(monkeypatch)


def test_all_ranks_try_a_form_in_the_same_steps_and_hear_of_the_least_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group({"a": 1.5, "b": 1.2}, {"a": 1.1, "b": 1.3}, {"a": 1.4, "b": 0.9})
    for rank, each in enumerate(ranks):
        each.ready.append("a")
        run(ranks, 3, monkeypatch)
        assert all(not any(each.ran) for each in ranks) or rank == 2
    run(ranks, 20, monkeypatch)
    for each in ranks:
        each.ready.append("b")
    run(ranks, 30, monkeypatch)
    assert ranks[0].ran == ranks[1].ran == ranks[2].ran
    assert [ranks[0].ran.count(form) for form in "ab"] == [Rank.LASTS, Rank.LASTS]
    assert [each.used for each in ranks] == [[("a", 1.1), ("b", 0.9)]] * 3


def test_no_form_is_tried_before_all_ranks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group({"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 2.0})
    ranks[0].ready += ["a", "b"]
    ranks[1].ready += ["b"]
    run(ranks, 30, monkeypatch)
    assert [each.used for each in ranks] == [[("b", 2.0)]] * 2


def test_a_rank_whose_form_fails_keeps_all_from_using_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        ranks = group({"a": 2.0}, {"a": 2.0})
        for each in ranks:
            each.ready.append("a")
        ranks[rank].gains["a"] = 0.0
        run(ranks, 30, monkeypatch)
        assert [each.used for each in ranks] == [[("a", 0.0)]] * 2


def test_a_rank_that_stops_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group({"a": 2.0}, {"a": 2.0})
    for each in ranks:
        each.ready.append("a")
    run(ranks, 5, monkeypatch)
    run(ranks[:1], 30, monkeypatch)  # the other one is gone
    assert ranks[0].used == [("a", 0.0)]


def test_a_form_that_no_other_rank_has_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group({"a": 2.0}, {"b": 2.0})
    ranks[0].ready.append("a")
    ranks[1].ready.append("b")
    run(ranks, 205, monkeypatch)
    assert all(each.turns.has_given_up for each in ranks)
    assert not any(each.used for each in ranks)


def test_what_rank_0_knows_from_an_earlier_run_counts_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, known=("b", "a"))
    for each in ranks:
        each.ready += ["a", "b"]
    run(ranks, 10, monkeypatch)
    assert [each.used for each in ranks] == [[("b", 9.0)]] * 2


def test_a_store_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("the store has gone")

    rank = Rank(Gone(), 0, 2, {"a": 1.0}, None)  # type: ignore[arg-type]
    rank.ready.append("a")
    run([rank], 300, monkeypatch)
    assert rank.turns.has_given_up


def test_one_process_asks_nobody() -> None:
    turns = OneProcess()
    assert turns.next_form(["a", "b"], None) == Turn("a", False)
    assert turns.agreed(1.5) == 1.5
    assert turns.is_on
    turns.end()
    assert not turns.is_on
