"""Modules that the import compiles: what they share, and what they run while Dynamo is busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from deepytorch import autowrap
from deepytorch.compiler import compile_module
from deepytorch.compiler.beside import queue
from deepytorch.compiler.compile_module import compiled_call
from deepytorch.compiler.outcome import Outcome, tell


class Counts(nn.Module):
    """Notes each call that runs in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_eager = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.in_eager.append(tuple(x.shape))
        return self.linear(x).relu()


def call_of(**options: object) -> object:
    return compiled_call(Counts, None, {"lowering": "aot_eager", "wait": True, **options})


def test_while_dynamo_is_busy_known_graphs_run_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module, call = Counts(), call_of()
    call(module, torch.ones(2, 4))
    module.in_eager.clear()
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: True)
    call(module, torch.ones(2, 4))
    assert module.in_eager == []
    torch.testing.assert_close(call(module, torch.ones(2, 3, 4)), module.linear(torch.ones(2, 3, 4)).relu())
    assert module.in_eager == [(2, 3, 4)]
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: False)
    call(module, torch.ones(2, 3, 4))
    assert module.in_eager == [(2, 3, 4)]  # it was left to eager that once


def test_while_dynamo_is_busy_no_graph_of_other_options_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps graphs by code object, and asks for no backend where it is only to run."""
    torch._dynamo.reset()
    call_of()(Counts(), torch.ones(2, 4))
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: True)
    other = Counts()
    call_of(unpad=False)(other, torch.ones(2, 4))
    assert other.in_eager == [(2, 4)]


class OpenDoor:
    """Of a model whose graphs cannot be packed."""

    is_the_only_way = False

    def call(self, run: Callable[..., object], args: object, kwargs: object) -> str:
        return "packed"


def test_a_door_is_not_judged_by_a_call_that_was_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(module: nn.Module) -> str:
        if not queue.dynamo_is_busy():
            tell(Outcome.UNTRACEABLE)
        return "padded"

    module = nn.Linear(2, 2)
    handle = autowrap.Handle(module, compiled, OpenDoor())  # type: ignore[arg-type]
    monkeypatch.setattr(queue, "dynamo_is_busy", lambda: True)
    assert [handle(module) for _ in range(2)] == ["padded", "padded"]
    monkeypatch.setattr(queue, "dynamo_is_busy", lambda: False)
    assert [handle(module) for _ in range(3)] == ["padded", "packed", "packed"]


ONE_RANK_IS_BUSY = """
import os
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager", "wait": True})
import copy
import torch
import torch.distributed as dist
from deepytorch.compiler import compile_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, step = dist.get_rank(), 0
compile_module.dynamo_is_busy = lambda: rank == 0 and 3 <= step < 7
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
same = copy.deepcopy(net)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with deepytorch.paused():
    stock = DistributedDataParallel(same)
    reference = torch.optim.AdamW(stock.parameters(), lr=0.01)
for step in range(10):
    shape = (2, 3, 8) if step >= 3 and step % 2 else (4 + step, 8)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with deepytorch.paused():
        stock(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for one, other in zip(model.parameters(), stock.parameters()):
        torch.testing.assert_close(one, other)
[entry] = deepytorch.report().to_json()["gradients"]
assert (entry["from_eager_frames"] > 0) == (rank == 0), entry
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_whose_dynamo_is_busy_trains_as_one_that_traces(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_IS_BUSY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
