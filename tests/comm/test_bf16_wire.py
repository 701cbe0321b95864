"""Gradients as bf16 on the way, summed in float32: how far off, equal bits, what passes through, and training."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
import torch

from deepytorch.comm.group import bf16_wire
from deepytorch.errors import ConfigError
from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(180, func_only=True)

VALUES = """
init("{backend}", timeout=60)
from deepytorch.comm import all_reduce_bf16, reduce_scatter_bf16
u, f = 2.0**-8, 2.0**-24  # half a unit in the last place of bf16 and of fp32, relative

def drawn(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(size, count, generator=generator) * torch.logspace(-3, 3, count or 1)[:count]).to(dtype)

def same_everywhere(tensor):
    every = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(every, tensor)
    return all(torch.equal(one.view(torch.uint8), tensor.view(torch.uint8)) for one in every)

for count in (0, 1, size - 1, size + 1, 70_001):  # fewer than ranks, and parts that are not alike
    for op, share in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)):
        values = drawn(count)
        exact, sizes = values.double().sum(0) / share, values.double().abs().sum(0) / share
        mine = values[rank].clone()
        all_reduce_bf16(mine, op)
        bound = u * sizes + u * (exact.abs() + u * sizes) + 2 * size * f * sizes  # rounded once, summed, rounded once
        assert ((mine.double() - exact).abs() <= bound).all(), (count, op)
        assert count < 1000 or not torch.equal(mine, values.sum(0) / share), "nothing was cast"
        assert same_everywhere(mine) if count else mine.numel() == 0
        whole = drawn(count * size)
        before = whole[rank].clone()
        part = torch.full((count,), -1.0)
        reduce_scatter_bf16(part, whole[rank], op)
        assert torch.equal(whole[rank], before), "the input was written to"
        parts = whole.double()[:, rank * count :][:, :count] / share
        bound = (u + 2 * size * f) * parts.abs().sum(0)  # not rounded again
        assert ((part.double() - parts.sum(0)).abs() <= bound).all(), (count, op)

# bfloat16 is not rounded on its way: its sums are those of float32
values = drawn(5_003 * size, torch.bfloat16)
part = torch.empty(5_003, dtype=torch.bfloat16)
reduce_scatter_bf16(part, values[rank].clone())
assert torch.equal(part, values.float().sum(0).bfloat16()[rank * 5_003 :][:5_003])
mine = torch.full((7,), 256.0 if rank == 0 else 1.0)  # 256 + 1 is 256 in bf16, added up there rank by rank
all_reduce_bf16(mine)
assert (mine == {{2: 256.0, 3: 258.0, 4: 260.0}}[size]).all(), mine

mine = torch.ones(2, 50)
mine[0, 3] = float("nan") if rank == size - 1 else 1.0
mine[1, 4] = float("inf") if rank == 0 else 1.0
mine[1, 5] = float("-inf")
all_reduce_bf16(mine)
assert mine[0, 3].isnan() and mine[1, 4] == float("inf") and mine[1, 5] == float("-inf")
assert (mine == size).sum() == 97
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backend", "num_ranks"), [("gloo", 2), ("gloo", 4), ("deepytorch", 3)])
def test_values_are_rounded_once_each_and_sums_are_those_of_float32(backend, num_ranks):
    run(VALUES.format(backend=backend), num_ranks, timeout=120)


def test_a_group_among_others_sums_among_its_own():
    script = """
    init("gloo", timeout=60)
    from deepytorch.comm import all_reduce_bf16
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = torch.full((5,), 1.0 + 2.0**-20 + rank)
    all_reduce_bf16(mine, group=groups[rank % 2])
    assert (mine == (4.0 if rank % 2 == 0 else 2.0 + 2.0**-20)).all(), mine  # nothing is cast where nothing is sent
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, 3, 60)


TRAINING = """
init("gloo", timeout=60)
from torch import nn
from deepytorch.comm import send_bf16
import torch.nn.functional as F
wires = []
whole = dist.all_to_all_single
dist.all_to_all_single = lambda output, given, **named: (wires.append(given.numel()), whole(output, given, **named))

def train(wrap, send, steps=20):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(64, 63), nn.GELU(), nn.Linear(63, 8)))
    if send:
        assert send_bf16(model) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = F.cross_entropy(model(x), (x[:, :8]).argmax(1))
        loss.backward()
        gradients = [each.grad for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(each.dtype == torch.float32 for each in gradients)
    return losses, gradients
"""


def test_ddp_trains_alike_and_all_ranks_have_the_same_gradients():
    script = """
    wrap = lambda model: nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    exact, _ = train(wrap, False)
    assert not wires
    rounded, gradients = train(wrap, True)
    assert len(wires) >= 20, wires
    assert rounded != exact and abs(sum(rounded[-5:]) / sum(exact[-5:]) - 1) < 0.02, (rounded[-5:], exact[-5:])
    for each in gradients:
        others = [torch.empty_like(each) for _ in range(size)]
        dist.all_gather(others, each)
        assert all(torch.equal(each, other) for other in others)
    dist.barrier()
    dist.destroy_process_group()
    """
    run(TRAINING + textwrap.dedent(script), 2, 120)


def test_fsdp2_trains_alike_and_loses_nothing_of_gradients_that_were_bf16():
    script = """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    wrap = lambda model: fully_shard(model)
    exact, _ = train(wrap, False)
    rounded, _ = train(wrap, True)
    assert len(wires) == 20, wires
    assert rounded != exact and abs(sum(rounded[-5:]) / sum(exact[-5:]) - 1) < 0.02, (rounded[-5:], exact[-5:])
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = lambda model: fully_shard(model, mp_policy=half)
    assert train(wrap, True)[0] == train(wrap, False)[0]
    dist.barrier()
    dist.destroy_process_group()
    """
    run(TRAINING + textwrap.dedent(script), 2, 120)


def test_a_gpus_bucket_goes_beside_the_callers_stream_and_is_there_for_who_waits(monkeypatch):
    done = []

    class Stream:
        def __init__(self, device):
            done.append(f"a stream on {device.type}")

        def wait_stream(self, stream):
            done.append(f"waits for {stream}")

        def __enter__(self):
            done.append("current")

        def __exit__(self, *_):
            done.append("left")

    class Future:
        def __init__(self, devices):
            self.devices = devices

        def set_result(self, tensor):
            done.append("told")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.futures, "Future", Future)
    tensor = SimpleNamespace(device=torch.device("cuda:1"), record_stream=lambda stream: done.append("kept for it"))
    sender = bf16_wire._Sender(None)
    order = ["waits for the caller's", "current", "sums", "kept for it", "told", "left"]
    assert sender.send(tensor, lambda: done.append("sums")).devices == [tensor.device]
    assert done == ["a stream on cuda", *order]
    sender.send(tensor, lambda: done.append("sums"))
    assert done == ["a stream on cuda", *order, *order]  # all buckets on one stream


@pytest.mark.slow
def test_buckets_of_a_compiled_backward_go_by_it():
    script = """
    init(timeout=60)
    import copy
    from torch import nn
    from deepytorch.comm import send_bf16
    sent = []
    whole = dist.all_to_all_single
    dist.all_to_all_single = lambda output, given, **named: (sent.append(given.numel()), whole(output, given, **named))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(40, 30), nn.Linear(30, 5)

        def forward(self, x):
            return self.head(self.first(x).relu()).square().mean()

    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(Net())
    assert send_bf16(ddp) == 1
    call = torch.compile(ddp, backend="deepytorch", options={"lowering": "aot_eager"})
    for step in range(5):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()
        call(x).backward()
        found = ddp.module.first.weight.grad
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        alone(x).backward()
        every = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(every, alone.first.weight.grad)
        sizes = sum(each.abs() for each in every) / size
        assert ((found - sum(every) / size).abs() <= 2.0**-7 * sizes).all()
        assert not torch.equal(found, sum(every) / size), "nothing was cast"
    reducer = ddp.__dict__["_deepytorch_gradients"].reducer
    assert len(sent) - 1 == reducer.counts.collectives >= 4, (sent, reducer.counts)  # the first by DDP, in one bucket
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, 2, 120)


@pytest.mark.parametrize(
    "given",
    [torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.int32), torch.ones(4, 4)[:, :2]],
    ids=["fp16", "int32", "strided"],
)
def test_what_it_does_not_take_is_refused_before_anything_is_sent(given):
    with pytest.raises(ConfigError, match="expected SUM or AVG of float32 or bfloat16, contiguous"):
        bf16_wire.all_reduce_bf16(given)
    with pytest.raises(ConfigError, match="expected SUM or AVG"):
        bf16_wire.all_reduce_bf16(torch.ones(4), torch.distributed.ReduceOp.MAX)
    with pytest.raises(ConfigError, match="fully_shard"):
        bf16_wire.send_bf16(torch.nn.Linear(2, 2))
