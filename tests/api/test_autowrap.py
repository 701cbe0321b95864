"""What `import deepytorch` does to a training script. Each script runs in a process of its own."""

from __future__ import annotations

import pytest

from tests.cold import run_cold
from tests.warm import run_script

PREAMBLE = """
import copy, io, pickle, threading
import torch
from torch import nn
from deepytorch import autowrap, handles
deepytorch.configure(options={"lowering": "aot_eager"})

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def optimizer_of(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

def train(model, optimizer, steps=3, call=None):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = (model if call is None else call)(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses

def regions():
    return len(deepytorch.report().to_json()["regions"])

torch.manual_seed(0)
"""


def run(script: str, **environment: str) -> str:
    done = run_script(f"import deepytorch\n{PREAMBLE}\n{script}", env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def run_alone(script: str, first: str = "import deepytorch") -> str:
    """In a process that has imported nothing before `first`, from no file."""
    done = run_cold(f"{first}\n{PREAMBLE}\n{script}")
    return done.stderr + done.stdout


@pytest.mark.parametrize("first", ["import deepytorch", "import torch\nimport deepytorch"])
def test_the_outermost_module_of_a_step_is_compiled_in_place(first: str) -> None:
    said = run_alone(
        """
import logging
logging.basicConfig(level=logging.INFO)
model = Net()
same = copy.deepcopy(model)
keys = list(model.state_dict())
losses = train(model, optimizer_of(model))
assert handles.armed(model) and type(model) is Net and list(model.state_dict()) == keys
assert not len(autowrap._PROBED)
assert regions() == 1 and model.body._compiled_call_impl is None
with deepytorch.paused():
    for one, other in zip(losses, train(same, optimizer_of(same))):
        torch.testing.assert_close(one, other)
for one, other in zip(model.parameters(), same.parameters()):
    torch.testing.assert_close(one, other)
""",
        first,
    )
    assert said.count("armed Net (90 trained parameters)") == 1


def test_modules_are_looked_for_once_however_many_optimizers_there_are() -> None:
    run("""
import gc, weakref
walks, all_objects = [], gc.get_objects
gc.get_objects = lambda *args: walks.append(args) or all_objects(*args)

class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return 2 * self.inner(x)

generator, discriminator = Net(), Net()
optimizers = [torch.optim.SGD([p], lr=0.1) for p in [*generator.parameters(), *discriminator.parameters()]]
loose = torch.ones(2, requires_grad=True)
assert len(walks) == 1
torch.optim.SGD([loose, generator.head.bias], lr=0.1)
torch.optim.SGD([loose], lr=0.1)
assert len(walks) == 2  # for what no module holds
assert set(autowrap._PROBED) == {*generator.modules(), *discriminator.modules()}

def steps(model, optimizers):
    class All:
        step = staticmethod(lambda: [each.step() for each in optimizers])
        zero_grad = staticmethod(lambda: [each.zero_grad() for each in optimizers])
    return train(model, All)

same = copy.deepcopy(generator)
losses = steps(generator, optimizers[:4])
assert handles.armed(generator) and not handles.armed(discriminator)
with deepytorch.paused():
    assert torch.equal(torch.stack(losses), torch.stack(train(same, optimizer_of(same))))

outer = Around(discriminator)  # after the optimizers that have made its parts known
optimizer = optimizer_of(outer)
train(outer, optimizer)
assert list(handles.HANDLES) == [generator, outer]

free, tied = Net(), Net()
optimizer_of(free)
tied.body = nn.Linear(8, 8)
optimizer_of(tied)
free.body.weight = tied.body.weight
both = torch.optim.SGD([tied.body.weight], lr=0.1)
assert {free, tied} <= set(autowrap._PROBED)

gone = weakref.ref(tied)
del tied, both, free
gc.collect()
assert gone() is None
""")


@pytest.mark.slow
def test_only_what_trains_is_touched() -> None:
    run_alone("""
model, teacher, average, frozen = Net(), Net(), Net(), Net().requires_grad_(False)
optimizer = optimizer_of(model, frozen)
for step in range(3):
    x = torch.randn(4, 8)
    with torch.no_grad():
        target = teacher(x) + average(x)
    (model(frozen(x) @ torch.ones(2, 8)) - target).square().mean().backward()
    optimizer.step()
assert handles.armed(model)
assert not any(map(handles.armed, (teacher, average, frozen)))
before = regions()
model.eval()
with torch.no_grad():
    model(torch.randn(3, 8))  # evaluation, another shape
model(torch.randn(7, 8))
model.train()
with torch.no_grad():
    model(torch.randn(2, 8))
assert regions() == before
""")


@pytest.mark.slow
def test_two_models_that_take_turns_and_one_that_is_called_several_times() -> None:
    run_alone("""
class Generator(Net): pass
class Discriminator(Net): pass
generator, discriminator = Generator(), Discriminator()
sketch, judge = copy.deepcopy(generator), copy.deepcopy(discriminator)
def play(generator, discriminator):
    ours, theirs = optimizer_of(generator), optimizer_of(discriminator)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        fake = generator(torch.randn(5, 8)) @ torch.ones(2, 8)
        loss = (discriminator(fake.detach()) - discriminator(torch.randn(5, 8))).square().mean()
        loss.backward()
        theirs.step(); theirs.zero_grad()
        loss = discriminator(fake).mean()
        loss.backward()
        ours.step(); ours.zero_grad(); theirs.zero_grad()
        losses.append(loss.detach())
    return losses
losses = play(generator, discriminator)
assert handles.armed(generator) and handles.armed(discriminator)
deepytorch.disable()
for one, other in zip(losses, play(sketch, judge)):
    torch.testing.assert_close(one, other)
""")


@pytest.mark.slow
def test_copies_and_pickles_are_clean_and_a_copy_is_armed_when_it_trains() -> None:
    run_alone("""
model = Net()
train(model, optimizer_of(model))
other = copy.deepcopy(model)
assert other._compiled_call_impl is None and not handles.armed(other)
train(other, optimizer_of(other))
assert handles.armed(other) and handles.armed(model)
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
assert loaded._compiled_call_impl is None
torch.testing.assert_close(loaded(torch.ones(1, 8)), model(torch.ones(1, 8)))
assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None
""")


@pytest.mark.slow
def test_what_is_compiled_already_is_left_alone_and_said() -> None:
    said = run_alone("""
import logging
logging.basicConfig(level=logging.INFO)
inside = Net()
inside.compile(backend="aot_eager")
theirs = inside._compiled_call_impl
train(inside, optimizer_of(inside))
assert inside._compiled_call_impl is theirs and not handles.armed(inside)
outside = Net()
train(outside, optimizer_of(outside), call=torch.compile(outside, backend="aot_eager"))
assert not handles.armed(outside)
copied = Net()
train(copied, optimizer_of(nn.DataParallel(copied)))
assert not handles.armed(copied) and copied._compiled_call_impl is None
after = Net()
optimizer = optimizer_of(after)  # before it is compiled
train(after, optimizer, call=torch.compile(after, backend="aot_eager"))
assert not handles.armed(after)
assert regions() == 0
""")
    assert "Net is compiled already" in said
    assert "DataParallel is left as it is" in said


def test_everything_can_be_undone() -> None:
    run("""
model, explicit = Net(), Net()
handle = deepytorch.optimize(explicit, options={"lowering": "aot_eager"})
train(explicit, optimizer_of(explicit))
assert handles.armed(explicit) and regions() == 1, deepytorch.report()
handle.restore()
assert "_compiled_call_impl" not in vars(explicit) and not handles.armed(explicit)
train(model, optimizer_of(model))
assert handles.armed(model)
waiting = Net()
optimizer = optimizer_of(waiting)
assert len(autowrap._PROBED) == 3
deepytorch.disable()
assert "_compiled_call_impl" not in vars(waiting.body)
assert "_compiled_call_impl" not in vars(model) and not len(autowrap._PROBED)
before = regions()
train(model, optimizer_of(model))
assert not handles.armed(model) and regions() == before
deepytorch.enable()
train(model, optimizer_of(model))
assert handles.armed(model)
try:
    deepytorch.optimize(Net(), options={"unpadd": True})
except deepytorch.DeepytorchError as error:
    assert "unpad" in str(error)
else:
    raise AssertionError("an unknown option was taken")
assert deepytorch.compile(Net(), options={"lowering": "aot_eager"})(torch.ones(2, 8)).shape == (2, 2)
""")


def test_what_is_optimized_after_its_optimizer_was_made_is_armed_as_a_whole() -> None:
    run("""
model = Net()
optimizer = optimizer_of(model)
assert len(autowrap._PROBED) == 3
handle = deepytorch.optimize(model)
assert len(autowrap._PROBED) == 0 and "_compiled_call_impl" not in vars(model.body)
train(model, optimizer)
assert list(handles.HANDLES) == [model]
handle.restore()
part = Net()
optimizer = optimizer_of(part)
deepytorch.optimize(part.body)
train(part, optimizer)
assert list(handles.HANDLES) == [part.body]
""")


def test_an_error_in_forward_is_the_users_and_training_goes_on() -> None:
    run("""
class Picky(Net):
    def forward(self, x):
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return super().forward(x)
model = Picky()
optimizer = optimizer_of(model)
train(model, optimizer)
for _ in range(2):
    try:
        model(torch.randn(3, 8))
    except ValueError as error:
        assert "three rows" in str(error)
    else:
        raise AssertionError("the error was lost")
train(model, optimizer)
assert handles.armed(model)
""")


def test_parts_of_a_model_that_are_called_one_after_the_other() -> None:
    run("""
class Whole(nn.Module):  # as a LightningModule is: its step calls its parts
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(), Net()
    def training_step(self, x):
        return self.decoder(self.encoder(x) @ torch.ones(2, 8)).square().mean()
whole = Whole()
same = copy.deepcopy(whole)
def fit(whole):
    optimizer = optimizer_of(whole)
    for step in range(3):
        torch.manual_seed(step)
        whole.training_step(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
fit(whole)
assert whole._compiled_call_impl is None and not len(autowrap._PROBED)
assert whole.encoder in handles.HANDLES and whole.decoder in handles.HANDLES
with deepytorch.paused():
    fit(same)
for one, other in zip(whole.parameters(), same.parameters()):
    torch.testing.assert_close(one, other)
""")


@pytest.mark.slow
def test_hooks_threads_and_optimizers_without_a_module() -> None:
    run_alone("""
seen = []
model = Net()
model.register_forward_hook(lambda module, given, result: seen.append(result.shape))
train(model, optimizer_of(model))
assert len(seen) == 3 and handles.armed(model)

loose = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([loose], lr=0.1)  # trains without a module
loose.square().sum().backward()
optimizer.step()
assert not len(autowrap._PROBED)

models = [Net() for _ in range(3)]
errors = []
def work(model):
    try:
        train(model, optimizer_of(model))
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(each,)) for each in models]
for each in threads: each.start()
for each in threads: each.join()
assert not errors, errors
assert all(map(handles.armed, models))
""")


def test_off_means_that_the_import_does_nothing() -> None:
    run(
        """
assert "deepytorch/integrations" not in torch.optim.Optimizer.__init__.__code__.co_filename
model = Net()
train(model, optimizer_of(model))
assert not handles.armed(model) and regions() == 0
""",
        DEEPYTORCH="off",
    )


def test_the_name_alone_arms_nothing() -> None:
    script = """
import torch
from torch import nn
model = nn.Linear(3, 3)
compiled = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager"})
other = nn.Linear(3, 3)
optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
other(torch.ones(2, 3)).sum().backward()
assert compiled(torch.ones(2, 3)).shape == (2, 3)
assert other._compiled_call_impl is None
assert "deepytorch/integrations" not in torch.optim.Optimizer.__init__.__code__.co_filename
"""
    done = run_script(script, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_import_opens_nothing_and_loads_no_compiler() -> None:
    script = """
import sys, threading, os, torch
files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
import deepytorch
assert threading.active_count() == 1
assert not files or len(os.listdir("/proc/self/fd")) == files
heavy = {"transformers", "deepytorch.compiler.backend", "torch._inductor.compile_fx", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    run_cold(script)


@pytest.mark.slow
def test_workers_forks_and_spawned_processes() -> None:
    run_alone("""
import multiprocessing
from torch.utils.data import DataLoader
from multiprocessing.reduction import ForkingPickler

model = Net()
optimizer = optimizer_of(model)
rows = [torch.randn(8, generator=torch.Generator().manual_seed(n)) for n in range(12)]
for context in ("fork", "spawn"):
    for batch in DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context=context):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
assert handles.armed(model) and regions() == 1

def child(queue):  # forked from a process that has compiled
    model.eval()
    with torch.no_grad():
        queue.put(model(torch.ones(2, 8)).tolist())
queue = multiprocessing.get_context("fork").Queue()
process = multiprocessing.get_context("fork").Process(target=child, args=(queue,))
process.start()
found = queue.get(timeout=60)
process.join(60)
assert process.exitcode == 0
model.eval()
with torch.no_grad():
    assert found == model(torch.ones(2, 8)).tolist()
ForkingPickler.dumps(model)  # what mp.spawn(fn, args=(model,)) does with its arguments
""")


@pytest.mark.slow
def test_averaged_copies_and_an_interrupt_inside_of_forward() -> None:
    run_alone("""
from torch.optim.swa_utils import AveragedModel
class Interrupted(Net):
    stop = False
    def forward(self, x):
        if self.stop:
            raise KeyboardInterrupt
        return super().forward(x)
model = Interrupted()
average = AveragedModel(model)
optimizer = optimizer_of(model)
train(model, optimizer)
average.update_parameters(model)
for one, other in zip(model.parameters(), average.module.parameters()):
    torch.testing.assert_close(one, other)
assert not handles.armed(average) and regions() == 1
average(torch.ones(2, 8)).sum().backward()  # in training mode, but no optimizer trains it
assert not handles.armed(average) and regions() == 1
model.stop = True
try:
    model(torch.ones(5, 8))
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("the interrupt was lost")
model.stop = False
train(model, optimizer)
assert handles.armed(model)
""")


def test_what_dynamo_cannot_trace_runs_as_it_is() -> None:
    run("""
import numpy
class Odd(Net):
    def forward(self, x):
        hidden = self.body(x)
        if float(hidden.detach().mean()) > 100:
            hidden = -hidden
        scale = float(numpy.frombuffer(hidden.detach().numpy().tobytes(), dtype="float32").mean())
        print(end="")
        names = [name for name in (lambda: (yield "a"))()]
        return self.head(torch.relu(hidden)) * (1 + 0.01 * scale) * len(names)
model = Odd()
same = copy.deepcopy(model)
losses = train(model, optimizer_of(model))
with deepytorch.paused():
    for one, other in zip(losses, train(same, optimizer_of(same))):
        torch.testing.assert_close(one, other)
""")


@pytest.mark.slow
def test_cells_of_a_notebook_run_again() -> None:
    run_alone("""
cells = [
'''class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, x):
        return FACTOR * self.head(torch.relu(self.body(x)))
''',
'''torch.manual_seed(0)
model = Net()
optimizer = optimizer_of(model)
losses = train(model, optimizer)
''',
]
FACTOR = 1.0
def run_cells():
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), globals())  # no file has its source
    return losses, model
first, one = run_cells()
again, other = run_cells()
assert handles.armed(one) and handles.armed(other) and one is not other
assert regions() == 2
cells[0] = cells[0].replace("FACTOR", "2.0 * FACTOR")  # the class is edited
edited, last = run_cells()
with deepytorch.paused():
    plain, _ = run_cells()
torch.testing.assert_close(first, again)
torch.testing.assert_close(edited, plain)
assert not torch.allclose(first[0], edited[0])
""")


@pytest.mark.slow
def test_explaining_arms_nothing() -> None:
    pytest.importorskip("transformers")
    run_alone("""
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train()
layer = model.model.layers[0]
layer.forward = torch.compiler.disable(layer.forward)  # cuts the graph, in a function that is not the script's own
optimizer = optimizer_of(model)
ids = torch.randint(5, 64, (4, 20))
mask = (torch.arange(20)[None] < torch.tensor([20, 5, 8, 12])[:, None]).long()
batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
entry = deepytorch.explain(model, **batch).to_json()["regions"][0]
assert (entry["name"], entry["outcome"]) == ("model entry of LlamaForCausalLM", "packed"), entry
assert not handles.armed(model)
model(**batch).loss.backward()
assert [name for name, module in model.named_modules() if module in handles.HANDLES] == [""]
""")
