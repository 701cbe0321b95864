"""Frameworks on the process group: they train as on gloo, step for step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cold import run_cold
from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(240, func_only=True)

MODEL = """
import torch.nn.functional as F
from torch import nn

def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 8))

def data(step, peer):
    generator = torch.Generator().manual_seed(100 * step + peer)
    return torch.randn(6, 16, generator=generator), torch.randint(0, 8, (6,), generator=generator)

def expected(steps, num_ranks):
    '''What one process makes of all ranks' batches.'''
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for peer in range(num_ranks):
            inputs, labels = data(step, peer)
            (F.cross_entropy(model(inputs), labels) / num_ranks).backward()
        optimizer.step()
    return model.state_dict()

def same(found, wanted):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
for arguments in ({}, {"bucket_cap_mb": 0.02}, {"gradient_as_bucket_view": True, "static_graph": True}):
    model = DistributedDataParallel(build(seed=rank), **arguments)  # rank 0's weights are broadcast
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        inputs, labels = data(step, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    same(model.module.state_dict(), expected(5, size))

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
model = DistributedDataParallel(build(), bucket_cap_mb=0.02)
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
inputs, labels = data(0, rank)
F.cross_entropy(model(inputs), labels).backward()
means = [p.grad.clone() for p in model.parameters()]
for mean in means:
    dist.all_reduce(mean, dist.ReduceOp.AVG)
for parameter, mean in zip(model.parameters(), means):
    torch.testing.assert_close(parameter.grad, mean)
model = DistributedDataParallel(build())  # one bucket: those of several would race each other, on gloo too
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # its callbacks start collectives of their own
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    inputs, labels = data(step, rank)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
for parameter in model.parameters():
    everyones = [torch.empty_like(parameter) for _ in range(size)]
    dist.all_gather(everyones, parameter.detach())
    assert all(torch.equal(one, everyones[0]) for one in everyones)
"""

FSDP2 = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = build()
mesh = init_device_mesh("cpu", (size,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    inputs, labels = data(step, rank)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    same(whole, expected(5, size))
"""

COMPILED = """
import torch.distributed._functional_collectives as functional
group = dist.group.WORLD

@torch.compile(backend="aot_eager", fullgraph=True)
def step(x):
    summed = functional.all_reduce(x * 2, "sum", group)
    gathered = functional.all_gather_tensor(summed + rank, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "avg", 0, group)
    return functional.broadcast(scattered.cos(), 1, group)

x = torch.arange(600.0).view(200, 3) / 600 + rank
everything = sum(torch.arange(600.0).view(200, 3) / 600 + peer for peer in range(size)) * 2
torch.testing.assert_close(step(x), (everything + 1).cos())
"""


@pytest.mark.parametrize("script", [DDP, FSDP2, COMPILED], ids=["ddp", "fsdp2", "functional"])
def test_frameworks_train_as_one_process_does(script):
    run(f"{MODEL}\ninit()\n{script}\ndist.destroy_process_group()", 2, 200)


@pytest.mark.slow
def test_torchrun_and_the_environments_rendezvous():
    script = (
        "import torch, torch.distributed as dist\n"
        "import deepytorch\n"
        "dist.init_process_group('deepytorch')\n"
        "mine = torch.full((5000,), float(dist.get_rank()))\n"
        "dist.all_reduce(mine)\n"
        "assert (mine == 1).all()\n"
        "words = f'rank {dist.get_rank()} of {dist.get_world_size()} {dist.get_backend()}\\n'\n"
        "import os; os.write(1, words.encode())\n"  # in one piece
        "dist.destroy_process_group()\n"
    )
    done = run_cold(script, num_ranks=2, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 deepytorch", "rank 1 of 2 deepytorch"]


@pytest.mark.slow
def test_gradients_go_back_to_ddp_in_the_middle_of_training() -> None:
    script = """
    import copy
    import deepytorch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import torch.nn.functional as F
    from deepytorch.switch import SWITCH
    from deepytorch.patches import ledger

    init(timeout=60)
    SWITCH.enabled = True
    deepytorch.configure(options={"lowering": "aot_eager"})

    def batches():
        for step in range(9):
            generator = torch.Generator().manual_seed(10 * step + rank)
            yield torch.randn(4, 16, generator=generator)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    reference = copy.deepcopy(plain)
    with deepytorch.paused():
        eager = DistributedDataParallel(reference)
        theirs = torch.optim.AdamW(eager.parameters(), 1e-2)
    model = DistributedDataParallel(plain)
    ours = torch.optim.AdamW(model.parameters(), 1e-2)
    for step, x in enumerate(batches()):
        if step == 5:
            assert model.reducer.ours is not None
            x_held = F.mse_loss(model(x), x[:, :4])  # its backward is still to be reduced by us
            deepytorch.disable()
            assert type(model.reducer).__module__ == "torch._C._distributed_c10d"
            assert not any(entry.applied for entry in ledger())
            x_held.backward()
        else:
            F.mse_loss(model(x), x[:, :4]).backward()
        ours.step()
        ours.zero_grad()
        with deepytorch.paused():
            F.mse_loss(eager(x), x[:, :4]).backward()
            theirs.step()
            theirs.zero_grad()
        for one, other in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not any(each._post_accumulate_grad_hooks for each in plain.parameters())
    dist.destroy_process_group()
    """
    run(script, num_ranks=2, timeout=120)
