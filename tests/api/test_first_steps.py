"""When a module is traced: never in a first step, and not before that can be afforded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch import first_steps, handles
from deepytorch.api import Summary
from deepytorch.compiler import budget
from deepytorch.compiler.budget import SHARE, Budget
from deepytorch.compiler.code import agreement
from deepytorch.compiler.code.agreement import SameStep
from deepytorch.compiler.outcome import Outcome, tell
from deepytorch.compiler.report import STARTS, RegionRecord, Report
from deepytorch.first_steps import FirstSteps
from deepytorch.handles import Handle
from tests.cold import run_cold


class Clock:
    """How old the process is, and what time it is, as the test says."""

    age, now = 1.0, 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that calls are timed by, and an account of this test's own."""
    CLOCK.age, CLOCK.now = 1.0, 0.0
    monkeypatch.setattr(first_steps, "time", CLOCK)
    monkeypatch.setattr(first_steps, "seconds_since_start", lambda: CLOCK.age)
    monkeypatch.setattr(budget, "seconds_since_start", lambda: CLOCK.age)
    monkeypatch.setattr(first_steps, "BUDGET", Budget())
    return CLOCK


class FirstEntry:
    """Takes as long as it is told."""

    is_the_only_way = False

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls, self.is_in_use, self.reason = seconds, 0, True, ""

    def call(self, run: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        CLOCK.now += self.seconds
        return "packed"

    def is_the_only_way_for(self, kwargs: Any) -> bool:
        return False

    def restore(self) -> None:
        self.is_in_use = False

    def leave(self, reason: str) -> None:
        self.is_in_use, self.reason = False, reason


class Padded(nn.Module):
    """A forward of 20 ms."""

    def forward(self, ids: torch.Tensor) -> str:
        CLOCK.now += 0.02
        return "padded"


class SelfAttention(Padded):
    """The same by a name that tells."""


def steps(entry: FirstEntry | None, kind: type[nn.Module] = Padded) -> tuple[FirstSteps, Any]:
    """Those of a module, and what makes one call."""
    module = kind()
    first = FirstSteps(module, lambda: entry, lambda _, pays: (pays, None))
    ids = torch.zeros(2, 4)

    def call() -> str:
        return "traced" if first.over() else first.call(module, (ids,), {})

    return first, call


def test_a_pause_is_affordable_as_a_share_of_the_run_or_of_what_was_saved(clock: Clock) -> None:
    budget = first_steps.BUDGET
    assert not budget.affords(1.0)
    clock.age = 1.0 / SHARE + 0.1
    assert budget.affords(1.0)
    clock.age = 1.0
    budget.account(1.0)
    assert budget.affords(1.0)
    budget.account(-5.0)
    assert not budget.affords(0.0)


def test_without_packing_at_entry_steps_are_eager_until_a_trace_is_affordable(clock: Clock) -> None:
    _, call = steps(None)
    clock.age = 1e6
    assert [call(), call(), call()] == ["padded", "padded", "traced"]


def test_what_is_traced_once_is_traced_earlier(clock: Clock) -> None:
    clock.age = 0.9 * first_steps._TRACE_SECONDS / SHARE
    found = {}
    for kind in (Padded, SelfAttention):
        _, call = steps(None, kind)
        found[kind] = [call() for _ in range(3)][-1]
    assert found == {Padded: "padded", SelfAttention: "traced"}


def test_what_is_packed_at_entry_alone_is_traced_as_its_batches_come(clock: Clock) -> None:
    costs = {}
    for only in (True, False):
        entry = FirstEntry(0.0)
        entry.is_the_only_way = only
        first, call = steps(entry, SelfAttention)
        clock.age = 0.9 * first_steps.ASK_SECONDS / SHARE
        assert [call(), call()] == ["padded", "padded"]
        assert not first._asked
        clock.age = 1.1 * first_steps.ASK_SECONDS / SHARE
        assert call() == "packed"
        costs[only] = first._cost
    assert costs[False] == costs[True] * first_steps._ONE_TRACE


@pytest.mark.usefixtures("clock")
def test_a_run_too_short_to_be_traced_is_told_so_in_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STARTS, "first_step", None)
    told = "So far steps ran as in eager"
    assert told not in str(Summary(Report([])))
    first = FirstSteps(nn.Linear(2, 2), lambda: None, lambda *_: (lambda: None, None))
    for _ in range(2):
        assert not first.over()
    assert told in str(Summary(Report([])))
    assert told not in str(Summary(Report([RegionRecord("region 0/0", "packed", "inductor")])))


def test_the_first_step_is_neither_traced_nor_packed_at_entry(clock: Clock) -> None:
    clock.age = 1e6
    entry = FirstEntry(0.0)
    _, call = steps(entry)
    call()
    assert entry.calls == 0


def test_packing_at_entry_that_pays_buys_the_trace(clock: Clock) -> None:
    clock.age = 5.0  # enough to ask, not to trace
    entry = FirstEntry(0.001)
    first, call = steps(entry)
    found = [call() for _ in range(120)]
    assert found[:6] == ["padded", "packed", "padded", "packed", "padded", "packed"]  # as it comes, watched, timed
    assert "traced" in found
    packed = found.index("traced") - 5
    saved = packed * 0.02 * first_steps.STEP_IN_FORWARDS * first_steps._CAUTION
    assert saved > 2.0  # what the trace is thought to cost, less the share
    assert entry.is_in_use is True  # restored by whoever traces
    assert first.then()[0] is True


def test_packing_at_entry_that_does_not_pay_is_given_up(clock: Clock) -> None:
    clock.age = 5.0
    entry = FirstEntry(0.05)
    first, call = steps(entry)
    found = [call() for _ in range(12)]
    assert not entry.is_in_use
    assert found[-1] == "padded"
    assert found.count("packed") <= first_steps._TRIED + 3
    assert "takes longer than it saves" in entry.reason
    assert first.then()[0] is False  # nor does packing in eager pay later, until steps are compiled


@pytest.mark.parametrize("pays", [True, False])
def test_after_a_trace_that_was_ended_steps_go_on_as_before_until_twice_its_time_is_affordable(
    clock: Clock, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "BUDGET", first_steps.BUDGET)
    module, ids = Padded(), torch.zeros(2, 4)
    entry, later, tries = FirstEntry(0.001 if pays else 0.05), FirstEntry(0.0), []
    budget, ended = first_steps.BUDGET, True

    def compiled(module: nn.Module, ids: torch.Tensor) -> str:
        tries.append(clock.age)
        if ended:
            tell(Outcome.PUT_OFF)
            budget.paused += 4.0
            clock.now += 4.0
            return str(module(ids))
        tell(Outcome.DECLINED)
        return "compiled"

    first = FirstSteps(module, lambda: entry, lambda _cost, _pays: (compiled, later))
    handle = Handle(module, lambda *_: None, first=first)
    clock.age = 5.0
    for _ in range(12):
        handle(module, ids)
    clock.age = 1.1 * first_steps._TRACE_SECONDS / SHARE
    packed, budget.balance = entry.calls, 0.0
    assert handle(module, ids) == "padded"
    assert len(tries) == 1
    assert [handle(module, ids) for _ in range(3)] == ["packed" if pays else "padded"] * 3
    assert (entry.calls - packed, later.calls) == (3 if pays else 0, 0)
    assert len(tries) == 1
    if not pays:  # what steps take in eager says nothing of what was lost
        assert budget.balance == pytest.approx(-0.0, abs=0.1)
    budget.balance, clock.age, ended = 0.0, 7.9 / SHARE, False
    handle(module, ids)
    assert len(tries) == 1
    clock.age = 8.1 / SHARE
    assert [handle(module, ids) for _ in range(2)] == ["compiled"] * 2
    assert len(tries) == 3
    assert handle.entry is (entry if pays else later)


def test_one_slow_padded_call_does_not_make_packing_seem_to_save_more(clock: Clock) -> None:
    class Uneven(Padded):
        calls = 0

        def forward(self, ids: torch.Tensor) -> str:
            Uneven.calls += 1
            CLOCK.now += 0.3 if Uneven.calls == 2 else 0.0  # the first of those that are timed
            return super().forward(ids)

    clock.age = 5.0
    _, call = steps(FirstEntry(0.0), Uneven)
    before = first_steps.BUDGET.balance
    assert [call() for _ in range(5)][3:] == ["packed", "padded"]
    assert first_steps.BUDGET.balance == before  # not before both have been timed
    assert call() == "packed"
    saved = first_steps.BUDGET.balance - before
    assert 0 < saved < 0.2 * first_steps.STEP_IN_FORWARDS * first_steps._CAUTION


def test_small_padded_batches_do_not_make_packing_seem_to_save_what_large_ones_do_not_cost(clock: Clock) -> None:
    """Each of whose positions costs more: most of a small batch's time goes into what all batches cost."""
    clock.age = 5.0
    entry = FirstEntry(0.019)
    first, call = steps(entry)
    before = first_steps.BUDGET.balance
    assert [call() for _ in range(5)][3:] == ["packed", "padded"]
    assert not first.over()
    for seconds in (0.019, 0.1):  # nor does it seem to lose: nobody knows what these would have cost padded
        entry.seconds = seconds
        first.call(nn.Identity(), (torch.zeros(80, 40),), {})
        assert 0 <= first_steps.BUDGET.balance - before < 0.02 * first_steps.STEP_IN_FORWARDS


def words(count: int) -> list[SameStep]:
    """Those of a group's ranks."""
    store = dist.HashStore()
    return [SameStep("1", store, rank) for rank in range(count)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_trace_in_the_same_step_which_rank_0_names(order: tuple[int, ...]) -> None:
    ranks, traced = words(3), {}
    for call in range(1, 20):
        for rank in order:
            if ranks[rank].has_come(call, affordable=call >= 5 - rank):  # the others could have done so earlier
                traced.setdefault(rank, call)
    assert traced == {0: 6, 1: 6, 2: 6}


def test_a_rank_that_is_further_ahead_traces_as_soon_as_it_hears_of_it() -> None:
    first, second = words(2)
    assert not any(second.has_come(call, affordable=False) for call in range(1, 9))
    assert not first.has_come(4, affordable=True)
    assert second.has_come(9, affordable=False)
    assert first.has_come(5, affordable=True)


def test_a_rank_that_hears_nothing_goes_by_itself_in_the_end() -> None:
    _, second = words(2)
    found = [second.has_come(call, affordable=call > 3) for call in range(1, 40)]
    assert found.index(True) == 3 + agreement._PATIENCE
    assert all(found[found.index(True) :])


def test_a_store_that_has_gone_is_as_one_that_says_nothing() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("it was closed")

    rank = SameStep("1", Gone(), 1)
    found = [rank.has_come(call, affordable=True) for call in range(1, 40)]
    assert found.index(True) == agreement._PATIENCE


TWO_RANKS = """
import sys
from pathlib import Path
import torch
import deepytorch
import torch.distributed as dist
from deepytorch import first_steps
from deepytorch.compiler import budget

deepytorch.configure(options={"wait": False}, process_groups=False)
dist.init_process_group("gloo")
rank, number, traced = dist.get_rank(), 0, []
first_steps.BUDGET.affords = lambda seconds: rank == 1 or number >= 10  # the other one could have traced long before
over = first_steps.FirstSteps.over

def noted(self):
    found = over(self)
    if found:
        traced.append(number)
    return found

first_steps.FirstSteps.over = noted
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 19):
    model(torch.full((2, 4), float(rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
Path(sys.argv[1], str(rank)).write_text(str(traced[0]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_under_ddp_trace_in_the_step_that_rank_0_names(tmp_path: Path) -> None:
    run_cold(TWO_RANKS, str(tmp_path), num_ranks=2, env={"DEEPYTORCH_COMPILE": "background"})
    first, second = (int((tmp_path / rank).read_text()) for rank in "01")
    assert first == second
    assert 10 < first < 10 + agreement._PATIENCE
