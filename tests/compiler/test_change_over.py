"""Ranks take the gradients of a module over in front of the same step: see [Note: Change-over]."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from deepytorch.compiler import change_over as tested
from deepytorch.compiler.change_over import ChangeOver
from deepytorch.errors import GradientError


class Rank:
    """One rank's side; `step()` is a forward behind an optimizer step."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.taken_at: int | None = None
        self.steps = 0
        self.passed = False
        self.side = ChangeOver("ddp1", store, rank, size, self._take)
        self.side._border = SimpleNamespace(passed=self._passed)

    def _take(self) -> None:
        self.taken_at = self.steps

    def _passed(self) -> bool:
        return self.passed

    def step(self) -> None:
        self.steps += 1
        self.passed = True
        self.side.forward()
        self.passed = False

    def microbatch(self) -> None:
        """One more forward of the same step."""
        self.side.forward()


def ranks(count: int) -> list[Rank]:
    """A group of them, with one store."""
    store = dist.HashStore()
    return [Rank(store, rank, count) for rank in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_ready_at_different_steps_take_over_at_the_same_one(seed: int) -> None:
    chosen = random.Random(seed)
    group = ranks(chosen.randint(2, 5))
    ready = [chosen.randint(0, 12) for _ in group]
    for step in range(40):
        for number in chosen.sample(range(len(group)), len(group)):  # in any order within a step
            if step >= ready[number]:
                group[number].side.ready()
            group[number].step()
            for _ in range(chosen.randint(0, 3)):
                group[number].microbatch()
    found = {rank.taken_at for rank in group}
    assert len(found) == 1
    assert max(ready) < found.pop() <= max(ready) + 1 + tested._AHEAD + 1


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_may_be_a_step_ahead_of_the_others(seed: int) -> None:
    chosen = random.Random(seed)
    group = ranks(3)
    for rank in group:
        rank.side.ready()
    while min(rank.steps for rank in group) < 30:
        behind = min(rank.steps for rank in group)
        chosen.choice([rank for rank in group if rank.steps <= behind + 1]).step()
    assert len({rank.taken_at for rank in group}) == 1
    assert group[0].taken_at is not None


def test_nobody_takes_over_while_one_is_not_ready() -> None:
    group = ranks(3)
    for rank in group[:2]:
        rank.side.ready()
    for _ in range(50):
        for rank in group:
            rank.step()
    assert [rank.taken_at for rank in group] == [None] * 3


@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_rank_cannot_compile_all_stay(broken: int) -> None:
    group = ranks(2)
    for number, rank in enumerate(group):
        (rank.side.failed if number == broken else rank.side.ready)()
    for _ in range(20):
        for rank in group:
            rank.step()
    assert [rank.taken_at for rank in group] == [None, None]
    assert not any(rank.side.is_over for rank in group)


def test_one_that_failed_cannot_say_later_that_it_is_ready() -> None:
    group = ranks(2)
    group[0].side.ready()
    group[1].side.failed()
    group[1].side.ready()
    for _ in range(20):
        for rank in group:
            rank.step()
    assert [rank.taken_at for rank in group] == [None, None]


def test_forwards_without_an_optimizer_step_do_not_count() -> None:
    group = ranks(2)
    for rank in group:
        rank.side.ready()
    for _ in range(100):
        for rank in group:
            rank.microbatch()
    assert [rank.taken_at for rank in group] == [None, None]


def test_a_rank_that_ran_too_far_ahead_says_so_and_does_not_reduce_otherwise_than_the_rest() -> None:
    group = ranks(2)
    for rank in group:
        rank.side.ready()
    for _ in range(10):
        group[1].step()
    group[0].step()
    with pytest.raises(GradientError, match="expected every rank to run as many"):
        group[1].step()


SCRIPT = """
import contextlib, os, sys, time
import torch, torch.distributed as dist
from torch import nn
ours = os.environ.get("DEEPYTORCH") != "off"
if ours:
    import deepytorch, deepytorch.background as background, deepytorch.first_steps as first
    first._TRACE_SECONDS = first._TRACE_SECONDS_A_MODULE = 0.0
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
    done = torch.tensor([float(type(ddp.reducer).__name__ == "_Silent")])
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
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]

    def run(**environment: str) -> dict[str, tuple[str, float]]:
        full = {**os.environ, "DEEPYTORCH_COMPILE": "beside", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **environment}
        done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=450, check=False)
        assert done.returncode == 0, done.stderr[-9000:]
        lines = [line.split() for line in done.stdout.splitlines()]
        return {rank: (steps, float(total)) for rank, steps, total in lines}

    found = run()
    reference = run(DEEPYTORCH="off", STEPS=found["0"][0])
    assert found["0"] == found["1"]
    assert found["0"][1] == pytest.approx(reference["0"][1], abs=1e-5)
