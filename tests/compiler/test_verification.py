"""The comparison of a packed step with eager: which step is compared, and what is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step import room
from deepytorch.compiler.step import verification as module
from deepytorch.compiler.step.room import has_room
from deepytorch.compiler.step.verification import Verification


class Clock:
    now = 1.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(module, "has_room", lambda devices: True)
    return found


def record() -> RegionRecord:
    return RegionRecord("region", "packed", "inductor")


def turns(verification: Verification, clock: Clock, compiled_from: int, steps: int = 10) -> list[int]:
    found = []
    for step in range(steps):
        if not verification.is_over and verification.take_turn(is_compiled=step >= compiled_from):
            found.append(step)
        clock.now += 0.5
    return found


def test_one_step_that_runs_compiled_is_compared(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def affords(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) > 2

    monkeypatch.setattr(BUDGET, "affords", affords)
    assert turns(Verification(None, record()), clock, compiled_from=4) == [6]
    assert asked == [pytest.approx(1.5)] * 3  # three steps of half a second


def test_a_comparison_that_came_to_nothing_is_made_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUDGET, "affords", lambda seconds: True)
    monkeypatch.setattr(module, "has_room", lambda devices: False)
    verification = Verification(None, record())
    for _ in range(3):
        assert turns(verification, clock, compiled_from=0)
        assert verification.difference(right, eager, [WEIGHT]) is None
    assert not turns(verification, clock, compiled_from=0)


def test_another_way_is_compared_in_its_first_compiled_step(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUDGET, "affords", lambda seconds: False)
    for every in (None, 1000):
        verification = Verification(every, record())
        verification.begin_again()
        verification._count = 1
        assert turns(verification, clock, compiled_from=3) == [3]


def test_one_of_so_many_is_compared_where_that_is_asked_for(clock: Clock) -> None:
    assert turns(Verification(4, record()), clock, compiled_from=6) == [0, 4, 8]


WEIGHT = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
BATCH = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def eager(changed: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [(BATCH @ changed(WEIGHT).T).square().mean()]


def right() -> list[Tensor]:
    return [torch.stack([(BATCH @ row).square().mean() for row in WEIGHT]).mean()]


def wrong() -> list[Tensor]:
    return [right()[0] * 1.01]


def wrong_gradient() -> list[Tensor]:
    [loss] = right()
    return [loss.detach() + 1.01 * (loss - loss.detach())]


def test_rounding_agrees_and_faults_do_not() -> None:
    found = record()
    verification = Verification(1, found)
    assert verification.difference(right, eager, [WEIGHT]) == ""
    assert "output 0 by 1.0e-02" in str(verification.difference(wrong, eager, [WEIGHT]))
    assert "the gradient of weight 0" in str(verification.difference(wrong_gradient, eager, [WEIGHT]))
    assert found.verified_steps == 3
    assert WEIGHT.grad is None


def test_hooks_of_the_script_are_not_called() -> None:
    calls: list[Tensor] = []
    handle = WEIGHT.register_hook(calls.append)
    try:
        assert Verification(1, record()).difference(right, eager, [WEIGHT]) == ""
    finally:
        handle.remove()
    assert not calls


def test_a_checkpoint_around_the_model_does_not_see_the_comparison() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert Verification(1, record()).difference(right, eager, [WEIGHT]) == ""
    assert not saved


def test_what_cannot_be_compared_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Tensor]:
        raise torch.OutOfMemoryError("asked for 80 GiB")

    found = record()
    assert Verification(1, found).difference(fails, eager, [WEIGHT]) is None
    monkeypatch.setattr(module, "has_room", lambda devices: False)
    assert Verification(None, found).difference(wrong, eager, [WEIGHT]) is None
    assert (found.verified_steps, found.fallbacks) == (0, [])


# ---------------------------------------------------------------------- memory


def test_the_host_needs_room_for_three_times_the_peak_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(room, "peak_memory", lambda: 6 << 30)
    monkeypatch.setattr(room, "memory", lambda: 8 << 30)
    for found, expected in (((0.5, 10 << 30), True), ((0.5, 9 << 30), False), ((0.2, 99 << 30), False), (None, True)):
        monkeypatch.setattr(room, "available_memory", lambda found=found: found)
        assert has_room([]) is expected
    monkeypatch.setattr(room, "available_memory", lambda: (0.5, 19 << 30))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    assert has_room([])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not has_room([])


def test_the_fullest_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 10, 1: 2}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    assert has_room([0])
    assert not has_room([0, 1])
