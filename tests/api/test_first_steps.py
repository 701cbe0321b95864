"""When a module is traced: never in a first step, and not before that can be afforded."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch import first_steps
from deepytorch.first_steps import Budget, FirstSteps


class Clock:
    """How old the process is, as the test says."""

    def __init__(self) -> None:
        self.age = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The process's age, and an account of this test's own."""
    made = Clock()
    monkeypatch.setattr(first_steps, "seconds_since_start", lambda: made.age)
    monkeypatch.setattr(first_steps, "BUDGET", Budget())
    return made


class Door:
    """Takes as long as it is told."""

    is_the_only_way = False

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls, self.is_open, self.reason = seconds, 0, True, ""

    def call(self, run: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        time.sleep(self.seconds)
        return "packed"

    def restore(self) -> None:
        self.is_open = False

    def leave(self, reason: str) -> None:
        self.is_open, self.reason = False, reason


class Padded(nn.Module):
    """A forward of 20 ms, or longer where the machine is busy: `longest` is what it took at most."""

    longest = 0.0

    def forward(self, ids: torch.Tensor) -> str:
        begin = time.perf_counter()
        time.sleep(0.02)
        Padded.longest = max(Padded.longest, time.perf_counter() - begin)
        return "padded"


class SelfAttention(Padded):
    """The same by a name that tells."""


def steps(door: Door | None, kind: type[nn.Module] = Padded) -> tuple[FirstSteps, Any]:
    """Those of a module, and what makes one call."""
    module = kind()
    first = FirstSteps(module, lambda: door, lambda: (module, None))
    ids = torch.zeros(2, 4)

    def call() -> str:
        return "traced" if first.over() else first.call(module, (ids,), {})

    return first, call


def test_a_pause_is_affordable_as_a_share_of_the_run_or_of_what_was_saved(clock: Clock) -> None:
    budget = first_steps.BUDGET
    assert not budget.affords(1.0)
    clock.age = 1.0 / first_steps.SHARE + 0.1
    assert budget.affords(1.0)
    clock.age = 1.0
    budget.account(1.0)
    assert budget.affords(1.0)
    budget.account(-5.0)
    assert not budget.affords(0.0)


def test_without_a_door_steps_are_eager_until_a_trace_is_affordable(clock: Clock) -> None:
    _, call = steps(None)
    clock.age = 1e6
    assert [call(), call(), call()] == ["padded", "padded", "traced"]


def test_what_is_traced_once_is_traced_earlier(clock: Clock) -> None:
    clock.age = 0.9 * first_steps._TRACE_SECONDS / first_steps.SHARE
    found = {}
    for kind in (Padded, SelfAttention):
        _, call = steps(None, kind)
        found[kind] = [call() for _ in range(3)][-1]
    assert found == {Padded: "padded", SelfAttention: "traced"}


def test_what_is_packed_at_its_door_alone_is_traced_as_its_batches_come(clock: Clock) -> None:
    costs = {}
    for only in (True, False):
        door = Door(0.0)
        door.is_the_only_way = only
        first, call = steps(door, SelfAttention)
        clock.age = 0.9 * first_steps._ASK_SECONDS / first_steps.SHARE
        assert [call(), call()] == ["padded", "padded"]
        assert not first._asked
        clock.age = 1.1 * first_steps._ASK_SECONDS / first_steps.SHARE
        assert call() == "packed"
        costs[only] = first._cost
    assert costs[False] == costs[True] * first_steps._ONE_TRACE


def test_the_first_step_is_never_traced_and_asks_no_door(clock: Clock) -> None:
    clock.age = 1e6
    door = Door(0.0)
    _, call = steps(door)
    call()
    assert door.calls == 0


def test_a_door_that_pays_packs_and_buys_the_trace(clock: Clock) -> None:
    clock.age = 5.0  # enough to ask, not to trace
    Padded.longest = 0.0
    door = Door(0.001)
    _, call = steps(door)
    found = [call() for _ in range(120)]
    assert found[:4] == ["padded", "packed", "padded", "packed"]  # as it comes, watched, timed, packed
    assert "traced" in found
    packed = found.index("traced") - 3
    saved = packed * (Padded.longest + 0.002) * first_steps.STEP_IN_FORWARDS * first_steps._CAUTION
    assert saved > 2.0  # what the trace is thought to cost, less the share
    assert door.is_open is True  # shut by whoever traces


def test_a_door_that_does_not_pay_is_shut(clock: Clock) -> None:
    clock.age = 5.0
    door = Door(0.05)
    _, call = steps(door)
    found = [call() for _ in range(12)]
    assert not door.is_open
    assert found[-1] == "padded"
    assert found.count("packed") <= first_steps._TRIED + 2
    assert "takes longer than it saves" in door.reason
