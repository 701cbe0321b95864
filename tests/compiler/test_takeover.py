"""Ranks take the gradients of a module over after the same backward: see [Note: Takeover]."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from deepytorch.compiler.code.data_parallel import DdpGradients
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.takeover import Takeover
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan
from tests.cold import run_cold


class Rank:
    """One rank's side. A step is a forward, and the backward that is reduced, which no rank is through before all."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.taken_at: int | None = None
        self.steps = 0  # backwards
        self.side = Takeover("ddp1", store, rank, size, self._take)

    def _take(self) -> None:
        self.taken_at = self.steps

    def forward(self) -> None:
        self.side.forward_begins()
        if self.taken_at is None:
            self.side.forward_ended()

    def backward(self) -> None:
        """That of the forwards before it; a gradient comes to each parameter."""
        for _ in range(3):
            self.side.accumulated()
        self.steps += 1

    def microbatch(self) -> None:
        """A forward and a backward under `no_sync`."""
        self.side.forward_begins()
        self.side.accumulated()


def ranks(count: int) -> list[Rank]:
    """A group of them, with one store."""
    store = dist.HashStore()
    return [Rank(store, rank, count) for rank in range(count)]


def step(group: list[Rank]) -> None:
    for rank in group:
        rank.forward()
    for rank in group:
        rank.backward()


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_are_ready_at_different_steps_take_over_at_the_same_one(seed: int) -> None:
    chosen = random.Random(seed)
    group = ranks(chosen.randint(2, 5))
    ready = [chosen.randint(0, 12) for _ in group]
    begun = [0] * len(group)  # forwards whose end came
    while min(rank.steps for rank in group) < 30:
        number = chosen.randrange(len(group))
        rank = group[number]
        if begun[number] == rank.steps:  # in front of a forward, in any order among ranks
            for _ in range(chosen.randint(0, 2)):
                rank.microbatch()
            if rank.steps >= ready[number]:
                rank.side.ready()
            for _ in range(chosen.randint(1, 2)):
                rank.forward()
            begun[number] += 1
        elif min(begun) > rank.steps:  # all have come to this backward
            rank.backward()
    assert {rank.taken_at for rank in group} == {max(ready) + 1}


def test_nobody_takes_over_while_one_is_not_ready() -> None:
    group = ranks(3)
    for rank in group[:2]:
        rank.side.ready()
    for _ in range(50):
        step(group)
    assert [rank.taken_at for rank in group] == [None] * 3


@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_rank_cannot_compile_all_stay(broken: int, caplog: pytest.LogCaptureFixture) -> None:
    group = ranks(2)
    for number, rank in enumerate(group):
        (rank.side.failed if number == broken else rank.side.ready)()
    for _ in range(20):
        step(group)
    assert [rank.taken_at for rank in group] == [None, None]
    assert not any(rank.side.is_over or rank.side.lasts for rank in group)
    assert f"rank {broken} could not compile its step" in caplog.text


def test_one_that_failed_cannot_say_later_that_it_is_ready() -> None:
    group = ranks(2)
    group[0].side.ready()
    group[1].side.failed()
    group[1].side.ready()
    for _ in range(20):
        step(group)
    assert [rank.taken_at for rank in group] == [None, None]


def test_ranks_that_were_told_different_things_do_not_agree() -> None:
    group = ranks(2)
    for number, rank in enumerate(group):
        rank.side.settings = f"{number}"
        rank.side.ready()
    for _ in range(20):
        step(group)
    assert [rank.taken_at for rank in group] == [None, None]


def test_forwards_and_backwards_that_are_not_reduced_do_not_count() -> None:
    group = ranks(2)
    for rank in group:
        rank.side.ready()
    for _ in range(100):
        group[0].microbatch()
    step(group)
    for _ in range(100):
        group[1].microbatch()
    step(group)
    assert [rank.taken_at for rank in group] == [1, 1]


def test_a_rank_that_runs_ahead_under_local_sgd_goes_on() -> None:
    """Steps that nobody waits for: no backward of them is reduced."""
    group = ranks(2)
    for rank in group:
        rank.side.ready()
    for _ in range(1000):
        group[1].microbatch()
    for _ in range(3):
        step(group)
        for _ in range(7):
            group[0].microbatch()
    assert group[0].taken_at == group[1].taken_at == 1


def test_a_store_that_has_gone_stops_no_training() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    group = ranks(2)
    for rank in group:
        rank.side.ready()
    for rank in group:
        rank.side._store = SimpleNamespace(add=fail, check=fail, get=fail, set=fail)
    for _ in range(5):
        step(group)
    group[0].side.failed()
    assert [rank.taken_at for rank in group] == [None, None]


SCRIPT = """
import contextlib, os, sys, time
import torch, torch.distributed as dist
from torch import nn
ours = os.environ.get("DEEPYTORCH") != "off"
if ours:
    import deepytorch, deepytorch.background as background, deepytorch.process_facts
    deepytorch.process_facts._BEGAN -= 3600.0  # old enough to pay for any pause
    background._NICE = 0  # the machine may have other work, too
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).train()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(rank)
def step(number):
    for part in range(2):
        with ddp.no_sync() if part == 0 else contextlib.nullcontext():
            ddp(torch.randn(4, 8, generator=data)).square().mean().backward()
    if ours and rank == 1 and number % 4 == 0:
        time.sleep(0.1)  # one that is slower
    optimizer.step(); optimizer.zero_grad()
def is_over():
    done = torch.tensor([float(getattr(ddp.reducer, "ours", None) is not None)])
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return bool(done.item())
number, extra, over_at, deadline = 0, int(os.environ.get("STEPS", "0")), None, time.time() + 400
while (number < extra) if extra else not is_over():
    step(number); number += 1
    if not extra:
        time.sleep(0.05)
        assert time.time() < deadline
if not extra:
    for _ in range(20):
        step(number); number += 1
total = sum(each.double().sum().item() for each in model.parameters())
sys.stdout.write(f"{rank} {number} {total!r}\\n")
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # stock ranks, too, abort now and then when Python takes them down
"""


@pytest.mark.slow
def test_two_ranks_train_as_under_ddp_across_the_change_over(tmp_path: Path) -> None:
    def run(**environment: str) -> dict[str, tuple[str, float]]:
        settings = {"DEEPYTORCH_COMPILE": "background", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **environment}
        done = run_cold(SCRIPT, num_ranks=2, env=settings, timeout=450)
        lines = [line.split() for line in done.stdout.splitlines()]
        return {rank: (steps, float(total)) for rank, steps, total in lines}

    found = run()
    reference = run(DEEPYTORCH="off", STEPS=found["0"][0])
    assert found["0"] == found["1"]
    assert found["0"][1] == pytest.approx(reference["0"][1], abs=1e-5)


def test_compiled_code_begins_once_gradients_are_to_stay_with_ddp() -> None:
    takeover = Takeover("ddp1", dist.HashStore(), 0, 2, lambda: None)
    config = CompilerConfig(wait=False)
    lowering = RegionLowering(
        config, Plan.initial("region", config), DdpGradients("ddp1", {}, cast(Any, None), takeover)
    )
    assert not lowering.may_begin()  # another rank is not ready
    takeover.stop()
    assert lowering.may_begin()
