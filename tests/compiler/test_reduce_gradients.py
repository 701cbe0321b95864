"""Gradients reduced inside the compiled backward: what DistributedDataParallel computes, whatever the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cold import run_cold
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
    options = {"lowering": LOWERING, "tune": False, **options}  # compiled code is what is tested
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
    assert adopted(models[1]).takeover.is_over
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
assert len(buckets) > 2 and counts.syncs == 9 and counts.collectives == 9 * len(buckets), counts  # not the first
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
assert reducer.counts.syncs == 4, reducer.counts
assert reducer.counts.num_bytes == 4 * sum(bucket.num_bytes for bucket in reducer.plan.buckets)  # once a step

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
assert adopted(model).reducer.counts.late == 4 * 2

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
class Nobodys(Net):  # used in the first steps, and then by nobody
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(16, 16)
    def forward(self, x, y):
        return super().forward(self.extra(x) if x.shape[0] > 5 else x, y)
broken = DDP(Nobodys())
call = compiled(broken)
for number in range(2):
    call(*data(number)).backward()
error, _ = told(lambda: call(*(each[:3] for each in data(2))).backward())
assert "no gradient came for extra.weight, extra.bias" in error and "find_unused_parameters" in error, error

class Heads(Net):  # outputs of which the loss uses some, on this rank or on none
    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
    def forward(self, x, y):
        return super().forward(x, y), *(each(self.first.weight.mean() * x) for each in self.more)
def some(model, call, optimizer, number):
    optimizer.zero_grad()
    loss, one, two, three = call(*data(number))
    loss = loss + one.square().mean() if number > 3 else loss
    (loss + two.square().mean() if (number + rank) % 2 else loss).backward()
model = train(Heads, steps=7, what="outputs that are not used", step=some, find_unused_parameters=True)
assert model.module.more[2].weight.grad is None
def first_only(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*data(number))[0].backward()
model = train(Heads, what="outputs that are never used", step=first_only, find_unused_parameters=True)
assert all(each.weight.grad is None for each in model.module.more)
model = DDP(Heads())
call = compiled(model)
for number in range(2):
    sum(each.square().mean() for each in call(*data(number))).backward()
    model.zero_grad()
error, _ = told(lambda: call(*data(2))[0].backward())
assert "no gradient came for more.0.weight" in error, error

def join(model, call, optimizer, number):
    if number < 3:
        optimizer.zero_grad()
        return call(*data(number)).backward()
    with model.join():  # ranks have other numbers of batches
        for batch in range(2 + rank):
            optimizer.zero_grad()
            call(*data(10 * number + batch)).backward()
            optimizer.step()
class Normed(Net):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(16)
    def forward(self, x, y):
        return super().forward(self.batch(x), y)
for net in (Net, Normed):
    model = train(net, steps=5, what="joined after some steps", step=join)
    assert "join" in adopted(model).declined and adopted(model).reducer.counts.syncs == 2
"""

FROZEN = """
class Changing(Net):
    def __init__(self, frozen=()):
        super().__init__()
        self.shared = nn.Linear(16, 16)
        for each in frozen:
            getattr(self, each).requires_grad_(False)
    def forward(self, x, y):
        return super().forward(self.shared(x), y)

def apart(model):
    found = []
    for each in model.parameters():
        everyones = [torch.empty_like(each) for _ in range(size)]
        dist.all_gather(everyones, each.detach())
        found.append(not all(torch.equal(one, everyones[0]) for one in everyones))
    return found

def freezing(*changes):  # (in front of which step, a module's name, whether it is frozen there)
    def step(model, call, optimizer, number):
        for at, name, frozen in changes:
            if at == number:
                getattr(model.module, name).requires_grad_(not frozen)
        optimizer.zero_grad()
        call(*data(number)).backward()
    return step

unused = {"find_unused_parameters": True}
step = freezing((0, "first", True), (4, "first", False), (2, "second", True), (5, "second", False))
model = train(Changing, steps=8, what="frozen when gradients were taken over", step=step, **unused)
assert not any(apart(model))
model = train(lambda: Changing(["first"]), steps=6, what="frozen when DDP was made", step=freezing((3, "first", False)))
assert [name for (name, _), off in zip(model.module.named_parameters(), apart(model)) if off] == [
    "first.weight", "first.bias"]  # DDP never reduces them
early = freezing((0, "first", True), (1, "first", False))  # before all ranks have agreed
assert not any(apart(train(Changing, steps=5, what="for a step", step=early, **unused)))

class Added(Net):
    def __init__(self):
        super().__init__()
        self.again, self.ignored = nn.Linear(48, 300), nn.Linear(16, 16)
        DDP._set_params_and_buffers_to_ignore_for_model(self, ["ignored.weight", "ignored.bias"])
    def forward(self, x, y):
        return super().forward(self.added(self.ignored(x)), y)
def changing_the_module(model, call, optimizer, number):
    if number == 0:
        model.module.added = nn.Linear(16, 16)
        with torch.no_grad():
            for each in model.module.added.parameters():
                each.fill_(0.1)
        optimizer.add_param_group({"params": list(model.module.added.parameters())})
    if number == 3:
        model.module.second = model.module.again
    optimizer.zero_grad()
    call(*data(number)).backward()
model = train(Added, steps=6, what="added, ignored, shared later", step=changing_the_module, **unused)
names = [each.name for each in adopted(model).reducer.plan.members]
assert "ignored.weight" not in names and "added.weight" not in names and "again.weight" in names, names
assert any(apart(model))  # as under DDP
import copy
copied, reference = copy.deepcopy(model), copy.deepcopy(model)
call = compiled(copied)
for number in range(3):
    for each, run in ((copied, call), (reference, reference)):
        each.zero_grad()
        run(*data(number)).backward()
same(copied, reference, "a copy")
assert "copy" in adopted(copied), adopted(copied)
"""

DELAYED = """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)
    def forward(self, x, y):
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), y)
def delaying(make):
    net = make()
    return DDP(net, delay_all_reduce_named_params=[("b.weight", net.b.weight)], param_to_hook_all_reduce=net.a.weight)
for reduced_by_us in (True, False):
    models = [delaying(Pair) for _ in range(2)]
    calls = [models[0], compiled(models[1], reduce_gradients=reduced_by_us)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    for number in range(5):
        for model, call, optimizer in zip(models, calls, optimizers):
            optimizer.zero_grad()
            call(*data(number)).backward()
            dist.barrier()  # DDP does not wait for what it has delayed
        same(*models, ("delayed", number))
        for optimizer in optimizers:
            optimizer.step()
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
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
seen = []
def halves(state, bucket):  # a hook of the user's, that gives back another tensor
    seen.append((bucket.index(), bucket.buffer().numel()))
    work = dist.all_reduce(bucket.buffer() * 0.5, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * (2 / size))

def both(hook, state, what, rel=1e-5, steps=5, at=0):
    models = [DDP(Net(900)) for _ in range(2)]
    calls = [models[0], compiled(models[1])]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in models]
    for number in range(steps):
        for model, call, optimizer in zip(models, calls, optimizers):
            if number == at:
                hook(model) if state is None else model.register_comm_hook(state(), hook)
            optimizer.zero_grad()
            call(*data(number)).backward()
        same(*models, (what, number), rel)
        for optimizer in optimizers:
            optimizer.step()
    return models[1]

# averages, and nothing else: with our buckets
for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
    model = both(hook, lambda: dist.group.WORLD, hook.__name__, rel=1e-2)
    assert adopted(model).takeover.is_over and adopted(model).reducer.counts.syncs == 4
rounded = both(default_hooks.fp16_compress_hook, lambda: None, "fp16")
assert adopted(rounded).reducer.counts.syncs == 4
assert all(torch.equal(p.grad, p.grad.half().float()) for p in rounded.parameters())  # it was in between

# any other: with DDP's
others = {
    "a hook of the user's": (halves, lambda: None),
    "a wrapped one": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: dist.group.WORLD),
    "built in": (lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS), None),
}
for what, (hook, state) in others.items():
    model = both(hook, state, what, steps=9)
    assert "communication hook" in adopted(model), (what, adopted(model))
    model = both(hook, state, ("registered late", what), steps=9, at=4)
    assert adopted(model).reducer.counts.syncs == 3, adopted(model).reducer.counts
    assert "communication hook" in adopted(model).declined, (what, adopted(model).declined)

for at in (0, 4):  # it keeps a state by the index of a bucket
    seen.clear()
    model, state = DDP(Net()), powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    def power(state, bucket):
        seen.append((bucket.index(), bucket.buffer().numel()))
        return powerSGD_hook.powerSGD_hook(state, bucket)
    call, optimizer, losses = compiled(model), torch.optim.SGD(model.parameters(), 1e-2), []
    for number in range(14):
        if number == at:
            model.register_comm_hook(state, power)
        optimizer.zero_grad()
        losses.append(call(*data(0)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert seen == [(0, sum(p.numel() for p in model.parameters()))] * (14 - at), seen  # as DDP cuts them, and it stays
    for p in model.parameters():
        everyones = [torch.empty_like(p) for _ in range(size)]
        dist.all_gather(everyones, p.detach())
        assert torch.equal(everyones[0], everyones[1])

models = []
for _ in range(2):  # an optimizer that steps in the backward
    model = DDP(Net(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    models.append(model)
calls = [models[0], compiled(models[1])]
for number in range(6):
    for call in calls:
        call(*data(number)).backward()
assert "communication hook" in adopted(models[1])
for one, other in zip(models[0].parameters(), models[1].parameters()):
    torch.testing.assert_close(one, other)
in_backward = Net()
_apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
from deepytorch.compiler.code.data_parallel import adopt
in_backward = DDP(in_backward)
in_backward._lazy_init()  # as a first forward does
assert "communication hook" in adopt(in_backward)
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

from deepytorch.compiler.code import lower_region
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
assert entry["syncs"] == 4 and entry["num_bytes"] == 4 * sum(entry["bucket_bytes"]), entry
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

from deepytorch.compiler.code import lower_region
stock_lower = lower_region.lower
def failing(*arguments, **options):
    raise RuntimeError("this rank cannot compile")
if rank == 1:
    lower_region.lower = failing
model = train(Net, what="one rank in eager")
assert adopted(model).reducer.counts.late == (0 if rank == 0 else 4 * len(list(model.parameters())))
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
taken = report.total("steps_packed") + report.total("steps_profiled")
assert taken == (6 if rank == 0 else 3), taken
assert report.total("steps_profiled") == 1  # in eager, whose gradients come by hooks: before they are ours on rank 0
assert adopted(model).reducer.counts.late == (0 if rank == 0 else len(list(model.parameters())))
"""


REGISTERED = """
from deepytorch.comm.gradients import bucket_memory
from deepytorch.comm.group.devices import registered as devices  # loaded where it is asked for, and looked up there
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
    devices.registered_memory = lambda group, device: memory
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


AGAIN = """
import gc
def pair():
    torch._dynamo.reset()
    LEDGER.forget()
    nets = Net(), Net()
    nets[1].compile(backend="deepytorch", options={"lowering": LOWERING, "tune": False})
    return nets, [torch.optim.AdamW(each.parameters(), 1e-3, eps=1e-6) for each in nets]

def trained(nets, optimizers, wrappers, run, numbers):
    for number in numbers:
        for optimizer, own in zip(optimizers, wrappers):
            optimizer.zero_grad()
            run(own, number)
        same(*nets, number)
        for optimizer in optimizers:
            optimizer.step()

def wrapped(nets, **ddp):
    return [DDP(each, **ddp) for each in nets]

def step(own, number):
    own(*data(number)).backward()

# one after the other: code that was compiled once hands gradients to the reducer of each
nets, optimizers = pair()
for fold, options in enumerate(({}, {"find_unused_parameters": True}, {"static_graph": True}, {})):
    wrappers = wrapped(nets, **options)
    trained(nets, optimizers, wrappers, step, range(5 * fold, 5 * fold + 5))
    found = adopted(wrappers[1])
    assert found.takeover.is_over and found.reducer.counts.syncs == 4, (fold, found.reducer.counts)
    assert found.reducer.counts.late == 0 or "static_graph" in options, (fold, found.reducer.counts)
assert LEDGER.report().total("compiles") == 1

# each deleted before the next, and bare steps between: the code still hands gradients to the reducer in use
nets, optimizers = pair()
for fold in range(3):
    wrappers = wrapped(nets)
    trained(nets, optimizers, wrappers, step, range(5 * fold, 5 * fold + 5))
    found = adopted(wrappers[1]).reducer
    assert found.counts.syncs == 4 and found.counts.late == 0, (fold, found.counts)
    del wrappers, found
    gc.collect()
    trained(nets, optimizers, nets, step, range(90, 92))
assert LEDGER.report().total("compiles") == 1 and not any(each.fallbacks for each in LEDGER.report().regions)

# by turns, and with forwards of both that wait for a backward, or never have one: DDP has the gradients again
nets, optimizers = pair()
wrappers = list(zip(wrapped(nets), wrapped(nets, find_unused_parameters=True)))
trained(nets, optimizers, wrappers, lambda own, number: own[number % 2](*data(number)).backward(), range(8))
assert all(each.declined and each.takeover.is_over for each in map(adopted, wrappers[1]))
def together(own, number):
    losses = [each(*data(number)) for each in (own if number % 3 else own[::-1])]
    for loss in losses if number % 2 else losses[::-1]:
        loss.backward()
def dropped(own, number):
    own[0](*data(number))
    own[1](*data(number)).backward()
def looked(own, number):
    loss = own[0](*data(number))
    with torch.no_grad():
        (own[0](*data(number)), own[1](*data(number)))
    loss.backward()
WAYS = (together, dropped, looked)
for way in WAYS:
    trained(nets, optimizers, wrappers, way, range(8, 14))

# the same with forwards under the first one until its gradients are ours; the other one is DDP's for good, or is not
def averages(state, bucket):
    return dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future().then(lambda f: f.value()[0])
for declines in (False, True):
    for way in WAYS:
        for swapped in (False, True):
            nets, optimizers = pair()
            wrappers = list(zip(wrapped(nets), wrapped(nets)))
            for _, each in wrappers if declines else ():
                each.register_comm_hook(None, averages)
            trained(nets, optimizers, wrappers, lambda own, number: own[0](*data(number)).backward(), range(4))
            assert adopted(wrappers[1][0]).reducer.counts.syncs == 3
            ordered = [own[::-1] if swapped else own for own in wrappers]
            trained(nets, optimizers, ordered, way, range(4, 9))

# frozen, and wrapped again behind a forward without a backward
nets, optimizers = pair()
wrappers = wrapped(nets)
trained(nets, optimizers, wrappers, step, range(3))
for each, own in zip(nets, wrappers):
    own(*data(3))
    each.first.requires_grad_(False)
del own, wrappers
for optimizer in optimizers:
    optimizer.zero_grad()
trained(nets, optimizers, wrapped(nets), step, range(4, 8))

# a copy looks for unused parameters, as the script asked the module to
import copy
class Turns(Net):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(300, 8) for _ in range(2))
    def forward(self, x, y, which):
        self.head = self.heads[which]
        return super().forward(x, y)
def by_turns(model, call, optimizer, number):
    optimizer.zero_grad()
    call(*data(number), (number + rank) % 2).backward()
model = train(Turns, what="heads by turns", step=by_turns, find_unused_parameters=True)
assert not model.find_unused_parameters and copy.deepcopy(model).find_unused_parameters

# two models of one class share code, and a second one is wrapped later: the first one's forward waits meanwhile
(one, ours), (other, theirs) = [pair()[0] for _ in range(2)]
for declines in (False, True):
    firsts = wrapped((one, ours))
    for number in range(3):
        for own in firsts:
            own.zero_grad()
            own(*data(number)).backward()
    seconds = wrapped((other, theirs))
    for each in seconds if declines else ():
        each.register_comm_hook(None, averages)
    for number in range(3, 8):
        for own, beside in zip(firsts, seconds):
            (own.zero_grad(), beside.zero_grad())
            (own(*data(number)) + beside(*data(number + 50))).backward()
        (same(one, ours, number), same(other, theirs, number))
    assert adopted(firsts[1]).takeover.is_over and isinstance(adopted(seconds[1]), str) == declines

# the frame of the second wrapper's forward runs in eager on one rank
nets, optimizers = pair()
wrappers = list(zip(wrapped(nets), wrapped(nets)))
trained(nets, optimizers, wrappers, lambda own, number: own[0](*data(number)).backward(), range(4))
def eager_on_one(own, number):
    own[0](*data(number))
    with torch.compiler.set_stance("force_eager" if rank == 1 else "default"):
        loss = own[1](*data(number))
    loss.backward()
trained(nets, optimizers, wrappers, eager_on_one, range(4, 8))
"""


PARTS = {
    "again": AGAIN,
    "registered": REGISTERED,
    "steps": PLAIN + ACCUMULATION + DETERMINISTIC,
    "models": MODELS,
    "pieces": PIECES,
    "unused": UNUSED,
    "uneven": UNEVEN,
    "padded": PADDED,
    "reports": REPORTS,
    "hooks": HOOKS,
    "frozen": FROZEN,
    "delayed": DELAYED,
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
    run_cold(script, env={"DEEPYTORCH": switch})


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
    signal.pause()
error, _ = told(lambda: call(*data(1)).backward())
say("told", error)
"""
    with Ranks(script, 2) as ranks:
        ranks.until(0, "ready", 200)  # who comes first waits for the C++
        ranks.until(1, "ready", 200)
        ranks.processes[1].kill()
        ranks.processes[0].wait(40)
        assert "told" in ranks.output(0), ranks.output(0)


UNEVEN_RANKS = """
init(BACKEND, timeout=20)
def trained(runs, steps=8):
    reference, model = DDP(Net()), DDP(Net())
    call = compiled(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (reference, model)]
    for number in range(steps):
        for run, optimizer in zip((reference, runs(model, call, number)), optimizers):
            optimizer.zero_grad()
            run(*data(number)).backward()
            optimizer.step()
        same(reference, model, number)
    return model
model = trained(lambda model, call, number: model if rank == 0 else call)  # rank 0 does not compile
assert "_deepytorch_gradients" not in vars(model) if rank == 0 else not adopted(model).takeover.is_over
late = trained(lambda model, call, number: model if rank == 1 and number < 3 else call)
assert not adopted(late).takeover.is_over and not adopted(late).takeover.lasts

# one rank beyond the limit of recompilations, with two modules of one class
torch._dynamo.config.recompile_limit = 2
class Kinds(Net):
    kind = "0"
    def forward(self, x, y):
        return super().forward(x if self.kind != "never" else y, y)
torch._dynamo.reset()
for fold in range(2):
    reference, model = DDP(Kinds()), DDP(Kinds())
    call = torch.compile(model, backend="deepytorch", options={"lowering": LOWERING})
    for number in range(6):
        model.module.kind = str(10 * fold + number) if rank == 0 else "0"
        for each, run in ((reference, reference), (model, call)):
            each.zero_grad()
            run(*data(number)).backward()
        same(reference, model, (fold, number))
assert "_deepytorch_gradients" not in vars(model) if rank == 0 else not adopted(model).takeover.is_over
torch._dynamo.config.recompile_limit = 8

# modules of groups that not all ranks are in
some = dist.new_group([0, 1])
for group in (some, None) if rank < 2 else (None,):
    model = DDP(Net(), process_group=group)
    call = compiled(model)
    for number in range(3):
        call(*data(number)).backward()
    assert adopted(model).takeover.is_over, adopted(model).name

# options that differ: as DDP has them
model = DDP(Net(), gradient_as_bucket_view=rank == 1)
call = compiled(model, reduce_gradients=rank == 0)
for number in range(4):
    call(*data(number)).backward()
assert rank > 0 or not adopted(model).takeover.is_over
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.matrix), "deepytorch"])
def test_where_one_rank_cannot_or_is_late_every_rank_goes_on_under_ddp(backend: str) -> None:
    run(f"LOWERING, BACKEND = 'aot_eager', {backend!r}\n{HARNESS}\n{UNEVEN_RANKS}", 3, 150)
