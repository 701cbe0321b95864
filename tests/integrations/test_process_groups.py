"""`init_process_group` after the import: what was asked for, and what comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch.comm.group.native import native
from tests.cold import run_cold
from tests.warm import run_script


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile here, where no deadline of a script runs."""
    native.load()


@pytest.mark.parametrize(
    ("setup", "asked", "answers", "ours"),
    [
        ("", "'gloo'", "gloo", True),
        ("", "None", "undefined", True),
        ("", "backend='GLOO'", "gloo", True),
        ("", "'deepytorch'", "deepytorch", True),
        ("", "'fake'", "fake", False),
        ("deepytorch.configure(process_groups=False)", "'gloo'", "gloo", False),
        ("deepytorch.disable()", "'gloo'", "gloo", False),
    ],
)
def test_default_groups_are_ours_unless_told_otherwise(
    setup: str, asked: str, answers: str, ours: bool, tmp_path: Path
) -> None:
    script = f"""
import torch
import deepytorch
import torch.distributed as dist
{setup}
if {asked!r} == "'fake'":
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group({asked}, store=FakeStore(), rank=0, world_size=1)
else:
    dist.init_process_group({asked}, init_method="file://{tmp_path}/store", rank=0, world_size=1)
assert dist.get_backend() == {answers!r}, dist.get_backend()
from deepytorch.comm import chosen
try:
    chosen()
    ours = True
except deepytorch.errors.ConfigError:
    ours = False
assert ours == {ours}
from deepytorch.comm.group.groups import averages
assert averages(dist.group.WORLD) == ours  # gradients are averaged in one pass, whatever name the group goes by
mine = torch.ones(3)
dist.all_reduce(mine)
assert mine.tolist() == [1, 1, 1]
dist.destroy_process_group()
"""
    done = run_script(script, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_data_parallel_training_with_the_import_alone() -> None:
    script = """
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager"})
import copy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
same = copy.deepcopy(net)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
keys = list(model.state_dict())
stock = DistributedDataParallel(same)
with deepytorch.paused():
    reference = torch.optim.SGD(stock.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    for each, update in ((model, optimizer), (stock, reference)):
        if each is stock:
            with deepytorch.paused():
                each(x).square().mean().backward()
        else:
            each(x).square().mean().backward()
        update.step()
        update.zero_grad()
for one, other in zip(model.parameters(), stock.parameters()):
    torch.testing.assert_close(one, other)
assert list(model.state_dict()) == keys
[entry] = deepytorch.report().to_json()["gradients"]
assert entry["syncs"] == 4 and entry["parameters"] == 4, entry
dist.destroy_process_group()
"""
    run_cold(script, num_ranks=2)


def test_threads_of_a_group_get_python_once_more_before_it_ends(tmp_path: Path) -> None:
    """One of gloo's that drops an object of Python's later aborts the process: here a thread stands for it."""
    script = f"""
import sys, threading
import torch
import deepytorch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
dist.destroy_process_group()
over = threading.Event()

def drop():
    over.wait()
    open({str(tmp_path / "dropped")!r}, "w").close()

thread = threading.Thread(target=drop, daemon=True)
thread.start()
sys.setswitchinterval(100)  # nobody takes Python away from who has it
over.set()
"""
    run_cold(script)
    assert (tmp_path / "dropped").exists()
