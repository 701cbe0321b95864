"""Gradients reduced inside the compiled backward: what DistributedDataParallel computes, whatever the model does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(300, func_only=True)

HARNESS = """
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from deepytorch.compiler.report import LEDGER

class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 300)
        self.head = nn.Linear(300, 8)

    def forward(self, x, y):
        return F.cross_entropy(self.head(F.gelu(self.second(self.norm(F.relu(self.first(x)))))), y)

def data(step, peer=None):
    generator = torch.Generator().manual_seed(100 * step + (rank if peer is None else peer))
    return torch.randn(6, 16, generator=generator), torch.randint(0, 8, (6,), generator=generator)

def compiled(model, **options):
    torch._dynamo.reset()
    options = {"lowering": LOWERING, **options}
    return torch.compile(model, backend="deepytorch", options=options)

def adopted(model):
    return model.__dict__["_deepytorch_gradients"]

def same(one, other, what, rel=1e-5):
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters()):
        for kind, a, b in (("parameter", p, q), ("gradient", p.grad, q.grad)):
            assert (a is None) == (b is None), (what, kind, name, a is None, b is None)
            if a is not None:
                off = (a.double() - b.double()).norm().item()
                assert off <= rel * a.double().norm().item() + 1e-7, (what, kind, name, off)

def train(make, steps=5, what="", step=None, batch=data, ours=None, theirs=None, **ddp):
    '''Train both, alike; ours is compiled. Returns our DDP module.'''
    models = [DDP(make(), **ddp, **(theirs or {})), DDP(make(), **{"bucket_cap_mb": 0.02, **ddp, **(ours or {})})]
    calls = [models[0], compiled(models[1])]
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-6) for m in models]
    def plain(model, call, optimizer, number):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        call(*batch(number)).backward()
    for number in range(steps):
        for model, call, optimizer in zip(models, calls, optimizers):
            (step or plain)(model, call, optimizer, number)
        same(*models, (what, number))
        for optimizer in optimizers:
            optimizer.step()
    same(*models, what)
    assert not isinstance(adopted(models[1]), str), adopted(models[1])
    return models[1]
"""

PLAIN = """
from deepytorch.comm.gradients.bucket_memory import BucketMemory
is_held, held_before = BucketMemory.is_held, []
BucketMemory.is_held = lambda self: held_before.append(is_held(self)) or held_before[-1]
model = train(Net, steps=10, what="plain")
assert held_before and not any(held_before), "memory that all ranks made together was given up"
BucketMemory.is_held = is_held
counts = adopted(model).reducer.counts
buckets = adopted(model).reducer.plan.buckets
assert len(buckets) > 2 and counts.syncs == 10 and counts.collectives == 10 * len(buckets), counts
assert counts.late == 0, counts
assert not adopted(model).reducer._in_parts
assert [each.bucket for each in counts.transfers] == list(range(len(buckets)))
assert list(model.state_dict()) == list(DDP(Net()).state_dict())
assert list(compiled(model).state_dict())[0] == "_orig_mod.module.first.weight"
"""

DETERMINISTIC = """
torch.use_deterministic_algorithms(True)
plans = []
for turn in range(2):
    ddp = DDP(Net(600))
    call = compiled(ddp)
    for number in range(4):
        ddp.zero_grad()
        call(*data(number)).backward()
    plans.append(adopted(ddp).reducer.plan)
assert plans[0] == plans[1] and plans[0].measured, plans
torch.use_deterministic_algorithms(False)
"""

ACCUMULATION = """
def accumulate(model, call, optimizer, number):
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    with model.no_sync():
        for micro in range(2):
            call(*data(10 * number + micro)).backward()
    call(*data(10 * number + 9)).backward()
model = train(Net, what="accumulation", step=accumulate)
reducer = adopted(model).reducer
assert reducer.counts.syncs == 5, reducer.counts
assert reducer.counts.num_bytes == 5 * sum(bucket.num_bytes for bucket in reducer.plan.buckets)  # once a step

def clipped(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*data(number)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
train(Net, what="clipping", step=clipped)

held = {}
def keep(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*data(number)).backward()
    kept = held.setdefault(id(model), [])
    kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
    for grads in kept:  # what a user holds of earlier steps stays what it was
        assert all(torch.equal(now, then) for now, then in grads)
train(Net, what="held gradients", step=keep)

def grad_only(model, call, optimizer, number):
    optimizer.zero_grad()
    with model.no_sync():
        call(*data(10 * number)).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with model.no_sync():
        found = torch.autograd.grad(call(*data(10 * number + 1)), list(model.parameters()))
    for p, then, mine in zip(model.parameters(), before, found):
        assert torch.equal(p.grad, then)
        assert mine.data_ptr() != p.grad.data_ptr()
    kept.setdefault(number, []).append(found)
    call(*data(10 * number + 2)).backward()
kept = {}
train(Net, what="autograd.grad in between", step=grad_only)
for one, other in kept.values():
    for theirs, ours in zip(one, other):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

scalers = {}
def scaled(model, call, optimizer, number):
    scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=1024.0))
    optimizer.zero_grad()
    scaler.scale(call(*data(number))).backward()
    scaler.unscale_(optimizer)
    scaler.update()
train(Net, what="scaled", step=scaled)
"""

MODELS = """
class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.second.weight.requires_grad_(False)
train(Frozen, what="frozen")

class Tied(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(300, 16)
        self.back = nn.Linear(16, 300, bias=False)
        self.back.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.again = self.back  # the module twice, and its weight in two places of the graph
    def forward(self, x, y):
        hidden = self.again(self.embed(self.back(x)))
        return F.cross_entropy(self.head(F.gelu(hidden)), y) + super().forward(x, y)
train(Tied, what="tied")

class WithBuffers(Net):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(16)
    def forward(self, x, y):
        return super().forward(self.batch(x), y)
model = train(WithBuffers, what="buffers")
means = [torch.empty(16) for _ in range(size)]
with torch.no_grad():
    model(*data(1))  # buffers are broadcast at the beginning of a forward
dist.all_gather(means, model.module.batch.running_mean)

class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.first.to(torch.float64)
    def forward(self, x, y):
        return F.cross_entropy(self.head(F.gelu(self.second(self.norm(self.first(x.double()).float())))), y)
train(Mixed, what="mixed dtypes")

from torch.utils.checkpoint import checkpoint
class Checkpointed(Net):
    def forward(self, x, y):
        hidden = checkpoint(lambda t: F.gelu(self.second(self.norm(t))), self.first(x), use_reentrant=False)
        return F.cross_entropy(self.head(hidden), y)
train(Checkpointed, what="checkpointed")
train(Net, what="bucket view", gradient_as_bucket_view=True)
train(Net, what="static graph", static_graph=True)
train(Net, what="one bucket", ours={"bucket_cap_mb": 25})
class Transposed(Net):
    def __init__(self):
        super().__init__()
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())
train(Transposed, what="parameters laid out by columns")
"""

PIECES = """
class Broken(Net):
    def forward(self, x, y):
        hidden = self.norm(F.relu(self.first(x)))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(F.gelu(self.second(hidden))), y)
model = train(Broken, what="graph break")
assert adopted(model).reducer.counts.late == 0

class Eager(Net):
    @torch.compiler.disable
    def apart(self, hidden):
        return F.gelu(self.second(hidden))
    def forward(self, x, y):
        return F.cross_entropy(self.head(self.apart(self.norm(F.relu(self.first(x))))), y)
model = train(Eager, what="eager frame")
assert adopted(model).reducer.counts.late == 5 * 2

class InParts(Net):
    @torch.compiler.disable
    def apart(self, hidden):
        return F.linear(hidden, self.first.weight.t() @ self.first.weight)
    def forward(self, x, y):
        x = self.apart(x) + F.linear(x, self.first.weight.t() @ self.first.weight)
        return F.cross_entropy(self.head(F.gelu(self.second(self.norm(F.relu(self.first(x)))))), y)
train(InParts, what="a weight of a graph and of an eager frame")
train(InParts, what="the same in one bucket", ours={"bucket_cap_mb": 25})
def accumulate(model, call, optimizer, number):
    optimizer.zero_grad()
    with model.no_sync():
        call(*data(10 * number)).backward()
    call(*data(10 * number + 9)).backward()
train(InParts, what="the same, accumulated", step=accumulate)

torch._dynamo.config.optimize_ddp = True  # as stock cuts a model into the buckets of DDP
train(Net, what="cut by DDPOptimizer", ours={"bucket_cap_mb": 1})
torch._dynamo.config.optimize_ddp = False
"""

UNUSED = """
class Branches(Net):
    def __init__(self):
        super().__init__()
        self.mine = nn.ModuleList(nn.Linear(16, 16) for _ in range(size))
        self.nobodys = nn.Linear(16, 16)
    def forward(self, x, y):
        return super().forward(self.mine[rank](x), y)
model = train(Branches, what="branches", find_unused_parameters=True)
assert model.module.nobodys.weight.grad is None
class OneRank(Net):  # only one rank misses a weight, in the middle of its buckets
    def forward(self, x, y):
        hidden = F.relu(self.first(x))
        hidden = hidden if rank == 1 and int(x.shape[0]) % 2 else self.norm(hidden)
        return F.cross_entropy(self.head(F.gelu(self.second(hidden))), y)
def sizes(number):
    x, y = data(number)
    return x[: 3 + number % 4], y[: 3 + number % 4]
train(OneRank, steps=9, what="unused on one rank", find_unused_parameters=True, batch=sizes)
def micro(model, call, optimizer, number):  # used by one rank, and only before the step that reduces
    optimizer.zero_grad()
    with model.no_sync():
        call(*sizes(2 * (number % 3) + rank)).backward()
    x, y = data(number)
    call(x[:3], y[:3]).backward()
class Early(Net):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(16, 16)
    def forward(self, x, y):
        return super().forward(x if int(x.shape[0]) % 2 else self.extra(x), y)
train(Early, steps=7, what="used before the step that reduces", find_unused_parameters=True, step=micro)
class Nobodys(Net):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 3)
broken = DDP(Nobodys())
error, _ = told(lambda: compiled(broken)(*data(0)).backward())
assert "no gradient came for extra.weight, extra.bias" in error and "find_unused_parameters" in error, error

joined = DDP(Net())
call = compiled(joined)
call(*data(0)).backward()
def join():
    with joined.join():
        call(*data(1)).backward()
error, _ = told(join)
assert "join" in error and "reduce_gradients" in error, error
dist.barrier()
"""

SHARED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 24)
    def forward(self, x):
        return x + F.gelu(self.inner(x))
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(24, 8)
    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return F.cross_entropy(self.head(x), y)

def accumulated(model, call, optimizer, number):
    optimizer.zero_grad(set_to_none=number % 3 == 0)
    with model.no_sync():
        for micro in range(2):
            call(*data(10 * number + micro)).backward()
    call(*data(10 * number + 9)).backward()

def block_by_block(step=None, what=""):
    torch._dynamo.reset()
    stock, ours = DDP(Blocks()), DDP(Blocks(), bucket_cap_mb=0.002)
    for block in ours.module.blocks:  # one code object, and so one graph, for all of them
        block.compile(backend="deepytorch", options={"lowering": LOWERING})
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-6) for m in (stock, ours)]
    for number in range(6):
        for model, optimizer in zip((stock, ours), optimizers):
            if step is None:
                optimizer.zero_grad()
                model(*data(number)).backward()
            else:
                step(model, model, optimizer, number)
        same(stock, ours, (what, number))
        for optimizer in optimizers:
            optimizer.step()
    return ours
for step in (None, accumulated):
    ours = block_by_block(step, ("block by block", step))
    assert not adopted(ours).reducer._in_parts
    train(Blocks, steps=6, what=("blocks behind graph breaks", step), step=step)

torch._dynamo.reset()
pairs = [[DDP(Net()), DDP(Net())] for _ in range(2)]
for one, other in pairs:
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
own = {"backend": "deepytorch", "options": {"lowering": LOWERING}}
calls = [pairs[0], [torch.compile(m, **own) for m in pairs[1]]]
for number in range(6):
    for models, (one, other) in zip(pairs, calls):
        for model in models:
            model.zero_grad()
        (one(*data(number)) + 2 * other(*data(number + 50))).backward()
    same(pairs[0][0], pairs[1][0], ("two modules of one class", number))
    same(pairs[0][1], pairs[1][1], ("the second one", number))

from torch.utils.checkpoint import checkpoint
class Reentrant(Net):
    @torch.compiler.disable
    def forward(self, x, y):
        hidden = checkpoint(lambda t: F.gelu(self.second(self.norm(t))), self.entry(x), use_reentrant=True)
        return F.cross_entropy(self.head(hidden), y)
    def entry(self, x):
        return self.first(x)
model = DDP(Reentrant(), static_graph=True)
model.module.entry = torch.compile(model.module.entry, backend="deepytorch", options={"lowering": LOWERING})
def steps():
    for number in range(3):
        model(*data(number)).backward()
error, _ = told(steps)
assert "use_reentrant=False" in error, error
dist.barrier()
"""

HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
seen = []
def halves(state, bucket):  # a hook of the user's, that gives back another tensor
    seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters())))
    work = dist.all_reduce(bucket.buffer() * 0.5, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * (2 / size))

def both(hook, state, what, rel=1e-5, **ddp):
    models = [DDP(Net(), bucket_cap_mb=25), DDP(Net(), bucket_cap_mb=25)]
    calls = [models[0], compiled(models[1])]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in models]
    for model in models:
        model.register_comm_hook(state(), hook)
    for number in range(5):
        for model, call, optimizer in zip(models, calls, optimizers):
            optimizer.zero_grad()
            call(*data(number)).backward()
        same(*models, (what, number), rel)
        for optimizer in optimizers:
            optimizer.step()
    assert adopted(models[1]).reducer.counts.syncs == 5
    return models[1]

model = both(halves, lambda: None, "a hook of the user's")
assert seen and all(last == (index == 0) and grads == params for index, last, grads, params in seen), seen
both(default_hooks.allreduce_hook, lambda: None, "all-reduce")
both(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None, "a wrapped one")
rounded = both(default_hooks.fp16_compress_hook, lambda: None, "fp16")
assert all(torch.equal(p.grad, p.grad.half().float()) for p in rounded.parameters())  # it was in between
builtin = DDP(Net())
builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
compiled(builtin)(*data(0)).backward()
assert "built-in" in adopted(builtin), adopted(builtin)
late = DDP(Net())
call = compiled(late)
call(*data(0)).backward()
error, _ = told(lambda: late.register_comm_hook(None, halves))
assert "before the first step" in error, error
call(*data(0)).backward()

def power():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
train_power = DDP(Net(), bucket_cap_mb=25)
train_power.register_comm_hook(power(), powerSGD_hook.powerSGD_hook)
call = compiled(train_power)
optimizer = torch.optim.SGD(train_power.parameters(), 1e-2)
losses = []
for number in range(12):
    optimizer.zero_grad()
    loss = call(*data(0))
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
assert losses[-1] < losses[0], losses
ranks = [[torch.empty_like(p) for _ in range(size)] for p in train_power.parameters()]
for mine, p in zip(ranks, train_power.parameters()):
    dist.all_gather(mine, p.detach())
    assert torch.equal(mine[0], mine[1])
"""

ROWS = """
from deepytorch.comm.gradients import replanning
replanning.saves = lambda *_, **__: True  # whatever it costs here
class Texts(nn.Module):
    def __init__(self, tied=True, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 24, padding_idx=padding)
        self.places = nn.Embedding(9, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        if tied:
            self.head.weight = self.table.weight
    def forward(self, x, y):
        hidden = self.table(x) + self.places(torch.arange(x.shape[1]))
        return F.cross_entropy(self.head(F.gelu(self.inner(hidden))).flatten(0, 1), y.flatten())

def texts(number):
    generator = torch.Generator().manual_seed(100 * number + rank)
    rows = 1 + (number * (rank + 1)) % 4  # of other sizes on each rank
    return torch.randint(0, 12, (rows, 7), generator=generator), torch.randint(0, 50, (rows, 7), generator=generator)

def tables(model):
    return [adopted(model).reducer.plan.members[each].name for each in adopted(model).reducer.plan.tables]

model = train(Texts, steps=7, what="tied", batch=texts)
assert tables(model) == ["table.weight", "places.weight"], tables(model)
assert any(each.as_rows for each in adopted(model).reducer.counts.transfers)
model = train(lambda: Texts(False, 3), steps=7, what="apart, with a pad", batch=texts)
assert tables(model) == ["table.weight", "places.weight"]
assert float(model.module.table.weight.grad[3].abs().max()) == 0.0
sent = {each.bucket: each for each in adopted(model).reducer.counts.transfers if each.as_rows}
table = adopted(model).reducer.plan.bucket_of()[0]
assert 0 < sent[table].num_bytes <= 12 * (8 + 24 * 4), sent

def accumulate(model, call, optimizer, number):
    optimizer.zero_grad(set_to_none=number % 3 == 0)
    if number % 2:
        with model.no_sync():
            call(*texts(10 * number)).backward()
    call(*texts(10 * number + 9)).backward()
for tied in (True, False):
    train(lambda: Texts(tied), steps=7, what=("accumulated", tied), step=accumulate)

held = {}
def keep(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*texts(number)).backward()
    kept = held.setdefault(id(model), [])
    kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
    assert all(torch.equal(now, then) for grads in kept for now, then in grads)
train(Texts, steps=6, what="held", step=keep)

def grad_only(model, call, optimizer, number):
    optimizer.zero_grad()
    with model.no_sync():
        found = torch.autograd.grad(call(*texts(10 * number + 1)), list(model.parameters()))
    handed.setdefault(number, []).append(found)
    call(*texts(10 * number + 2)).backward()
for tied in (True, False):
    handed = {}
    train(lambda: Texts(tied), steps=6, what="autograd.grad in between", step=grad_only)
    for one, other in handed.values():
        for theirs, ours in zip(one, other):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

seen = []
def hooked():
    model = Texts(False)
    model.table.weight.register_hook(lambda gradient: seen.append(float(gradient.abs().sum())) or gradient)
    return model
train(hooked, steps=6, what="a hook of the user's on a table", batch=texts)
assert len(seen) == 12 and min(seen) > 0

class Sometimes(Texts):
    def forward(self, x, y):
        if x.shape[0] % 2:
            return F.cross_entropy(self.head(F.gelu(self.inner(self.places(x % 9)))).flatten(0, 1), y.flatten())
        return super().forward(x, y)
train(lambda: Sometimes(False), steps=8, what="a table that some ranks use", batch=texts, find_unused_parameters=True)

class Tasks(Texts):  # now with the head that shares the table, now without
    def __init__(self, first):
        super().__init__(tied=True)
        self.other, self.turn, self.first = nn.Linear(24, 50), 0, first
    def forward(self, x, y):
        hidden = self.inner(self.table(x))
        use_table = self.first if x.shape[1] > 5 else not self.first
        return F.cross_entropy((self.head if use_table else self.other)(hidden).flatten(0, 1), y.flatten())
def tasks(number):
    x, y = texts(number)
    return (x, y) if number < 4 or (number + rank) % 2 else (x[:, :5], y[:, :5])
for first in (True, False):
    train(lambda: Tasks(first), steps=9, what=("tasks", first), batch=tasks, find_unused_parameters=True)

from deepytorch.compiler import lower_region
stock_lower = lower_region.lower
def failing(*arguments, **options):
    raise RuntimeError("this rank cannot compile")
if rank == 1:
    lower_region.lower = failing
for tied in (True, False):
    model = train(lambda: Texts(tied), steps=6, what=("one rank in eager", tied), batch=texts)
    assert tables(model) == ["table.weight", "places.weight"]
lower_region.lower = stock_lower
"""

REPORTS = """
from deepytorch import explain, report
model = DDP(Net())
explained = explain(model, *data(0), options={"lowering": LOWERING})
assert "buckets" in str(explained) and explained.to_json()["gradients"]["parameters"] == len(list(model.parameters()))
assert "_deepytorch_gradients" not in model.__dict__
trained = train(Net, what="reported")
[entry] = report().to_json()["gradients"]
assert entry["syncs"] == 5 and entry["num_bytes"] == 5 * sum(entry["bucket_bytes"]), entry
assert "ms/step that the backward waited" in str(report())
report(reset=True)
[entry] = report().to_json()["gradients"]
assert entry["syncs"] == 0 and entry["num_bytes"] == 0
import gc
del trained
torch._dynamo.reset()
gc.collect()
assert report().to_json()["gradients"] == []  # it goes with its module
"""

UNEVEN = """
def uneven(number):
    x, y = data(number)
    rows = 1 + (number * (rank + 2)) % 6
    return x[:rows], y[:rows]
train(Net, steps=7, what="batches of other sizes on each rank", batch=uneven)

from deepytorch.compiler import lower_region
stock_lower = lower_region.lower
def failing(*arguments, **options):
    raise RuntimeError("this rank cannot compile")
if rank == 1:
    lower_region.lower = failing
model = train(Net, what="one rank in eager")
assert adopted(model).reducer.counts.late == (0 if rank == 0 else 5 * len(list(model.parameters())))
lower_region.lower = stock_lower
"""

PADDED = """
import transformers as hf
from tests.compiler.parity import batches, causal_batch
config = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(attn_implementation="sdpa", **config)).train()
sizes = [(4, 11 + 2 * i + 3 * rank, ("right", "left", "holes")[i % 3]) for i in range(6)]
given = batches(causal_batch, *sizes, seed=1 + rank)
if rank == 1:
    for batch in given[::2]:
        batch["labels"] = batch["input_ids"].clone()  # not ignored at pads: these run padded
def step(model, call, optimizer, number):
    optimizer.zero_grad()
    call(**given[number]).loss.backward()
model = train(llama, steps=6, what="padded text", step=step)
report = LEDGER.report()
taken = report.total("steps_packed") + report.total("steps_watched")
assert taken == (6 if rank == 0 else 3), taken
assert report.total("steps_watched") == 1  # in eager, whose gradients come by hooks
assert adopted(model).reducer.counts.late == len(list(model.parameters()))
"""


REGISTERED = """
from deepytorch.comm.gradients import bucket_memory
FROM = 20_000

class Registered:
    '''What stands for memory that NCCL was told of: it can be told from other memory, and may come to an end.'''
    def __init__(self, gives=100):
        self.made, self.gives, self.connected = 0, gives, 0
    def connect(self):
        self.connected += 1
    def allocate(self, num_bytes):
        if self.made >= self.gives:
            raise RuntimeError("no more of it")
        self.made += 1
        return torch.zeros(num_bytes, dtype=torch.uint8).share_memory_()

def buffers_of(reducer):
    '''Each bucket: its size, and whether it lies in such memory.'''
    buffers = [(bucket.buffer.nbytes, bucket.buffer.is_shared()) for bucket in reducer._sender._memory]
    assert len(buffers) > 2 and any(size < FROM for size, _ in buffers), buffers
    return buffers

def with_memory(memory, **given):
    bucket_memory.registered_memory = lambda group, device: memory
    model = train(lambda: Net(600), ours={"bucket_cap_mb": 0.1}, **given)
    return adopted(model).reducer

bucket_memory.registered_from = lambda group: FROM
held_before = []
is_held = bucket_memory.BucketMemory.is_held
bucket_memory.BucketMemory.is_held = lambda self: held_before.append(is_held(self)) or held_before[-1]
memory = Registered()
for size, registered in buffers_of(with_memory(memory, what="registered")):
    assert registered == (size >= FROM), size
assert memory.connected
assert held_before and not any(held_before), "what was made by all is what is used"

# somebody keeps gradients on one rank alone: what takes their place there is of the same kind
held = []
def keep(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*data(number)).backward()
    if rank == 1:
        held.append([p.grad for p in model.parameters()])
memory = Registered()
for size, registered in buffers_of(with_memory(memory, what="held on one rank", step=keep)):
    assert registered == (size >= FROM), size
made = [None, None]
dist.all_gather_object(made, memory.made)
assert made[1] > made[0], made

# one rank is offered none, or cannot make all of it: then none takes it, on any rank
for memory in (None if rank == 1 else Registered(), Registered(gives=1 if rank == 0 else 100)):
    assert not any(registered for _, registered in buffers_of(with_memory(memory, what="one rank without")))
"""


PARTS = {
    "registered": REGISTERED,
    "steps": PLAIN + ACCUMULATION + DETERMINISTIC,
    "models": MODELS,
    "pieces": PIECES,
    "unused": UNUSED,
    "uneven": UNEVEN,
    "padded": PADDED,
    "reports": REPORTS,
    "hooks": HOOKS,
    "shared": SHARED,
    "rows": ROWS,
}


def _part(part: str, backend: str) -> Any:
    # Those of ours in CI; stock gloo, above which the same code runs, with the matrix.
    marks = [pytest.mark.matrix] if backend == "gloo" else []
    return pytest.param(PARTS[part], backend, id=f"{part}-{backend}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "backend"), [_part(part, backend) for part in PARTS for backend in ("gloo", "deepytorch")]
)
def test_training_equals_stock_data_parallel(part: str, backend: str) -> None:
    script = f"LOWERING = 'aot_eager'\n{HARNESS}\ninit({backend!r}, timeout=60)\n{part}\ndist.destroy_process_group()"
    run(script, 2, 280)


CONVOLUTIONS = """
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
        self.head = nn.Linear(8, 8)
    def forward(self, x, y):
        hidden = self.second(F.relu(self.first(x.view(-1, 1, 4, 4))))
        return F.cross_entropy(self.head(hidden.mean((2, 3))), y)
model = train(Convolutions, what="convolutions")
reducer = adopted(model).reducer
assert reducer.counts.late == 0
assert not reducer._in_parts, "Inductor copied gradients that autograd was to take as they are"
"""


@pytest.mark.slow
def test_inductor_reduces_as_stock_does() -> None:
    script = f"LOWERING = 'inductor'\n{HARNESS}\ninit('gloo', timeout=120)\n{PLAIN}\n{CONVOLUTIONS}"
    script += "\ndist.destroy_process_group()"
    run(script, 2, 280)


@pytest.mark.matrix
def test_inductor_sends_rows() -> None:
    script = f"LOWERING = 'inductor'\n{HARNESS}\ninit('gloo', timeout=120)\n{ROWS[: ROWS.index('def accumulate')]}"
    run(f"{script}\ndist.destroy_process_group()", 2, 280)


@pytest.mark.slow
def test_one_rank_with_warm_caches_and_one_with_cold_ones(tmp_path: Path) -> None:
    for turn in range(2):
        own = f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r} + f'/{{rank * {turn + 1}}}'"
        script = f"{own}\nLOWERING = 'inductor'\n{HARNESS}\ninit('gloo', timeout=120)\n{PLAIN}"
        run(f"{script}\ndist.destroy_process_group()", 2, 280)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "switch"),
    [
        ("True", "False", "on"),
        ("'ddp_optimizer'", "False", "on"),
        ("'python_reducer'", "'python_reducer'", "on"),
        ("True", "True", "off"),
    ],
)
def test_dynamo_is_told_once_to_leave_models_whole(before: str, after: str, switch: str) -> None:
    script = f"""
import torch
torch._dynamo.config.optimize_ddp = {before}
torch.compile(torch.nn.Linear(2, 2), backend="deepytorch")
assert torch._dynamo.config.optimize_ddp == {after}, torch._dynamo.config.optimize_ddp
"""
    environment = {**os.environ, "DEEPYTORCH": switch}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


FAULT = """
init(BACKEND, timeout=5)
model = DDP(Net())
call = compiled(model)
call(*data(0)).backward()
say("ready")
"""


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.matrix), "deepytorch"])
def test_a_killed_rank_is_an_error_on_the_others(backend: str) -> None:
    script = f"""
LOWERING, BACKEND = 'aot_eager', {backend!r}
{HARNESS}
{FAULT}
if rank == 1:
    time.sleep(60)
time.sleep(1)
error, after = told(lambda: call(*data(1)).backward())
assert after < 15, after
say("told", error)
"""
    with Ranks(script, 2) as ranks:
        ranks.until(0, "ready", 200)  # who comes first waits for the C++
        ranks.until(1, "ready", 200)
        ranks.processes[1].kill()
        ranks.processes[0].wait(40)
        assert "told" in ranks.output(0), ranks.output(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ("DDP(Net()) if rank else DDP(Net(), find_unused_parameters=True)", "reduces other gradients"),
        ("DDP(Net(), bucket_cap_mb=1 + rank * 0.5)", "the same|reduces other gradients"),
    ],
)
def test_ranks_that_were_told_different_things_are_told_so(ours: str, words: str) -> None:
    script = f"""
LOWERING = 'aot_eager'
{HARNESS}
init('gloo', timeout=5)
class Wide(Net):
    def __init__(self):
        super().__init__(900)
Net = Wide
model = {ours}
error, after = told(lambda: compiled(model)(*data(0)).backward())
assert after < 60 and "reduces other gradients" in error, error
dist.barrier()
dist.destroy_process_group()
"""
    run(script, 2, 90)


@pytest.mark.slow
def test_a_rank_that_does_not_compile_is_waited_for_up_to_the_timeout() -> None:
    script = f"""
LOWERING = 'aot_eager'
{HARNESS}
init('gloo', timeout=5)
model = DDP(Net())
call = compiled(model) if rank == 0 else model
error, after = told(lambda: call(*data(0)).backward())
assert after < 60, after
if rank == 0:
    assert "rank 1 did not come to reduce its gradients within 5 s" in error, error
"""
    run(script, 2, 90, warm=False)


def test_cuda_graphs_do_not_record_what_is_decided_at_run_time() -> None:
    import torch

    import deepytorch.passes.ops.reduce  # noqa: F401, defines them

    for name in ("reduce_start", "reduce_part", "reduce_rows", "reduce_wait"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.deepytorch, name).default.tags
