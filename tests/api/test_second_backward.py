"""What compiled code cannot do, in scripts whose model the import armed; tests/scripts has more of them."""

from __future__ import annotations

import pytest

from tests.cold import run_cold
from tests.warm import run_script

PREAMBLE = """
import copy
import torch, torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from deepytorch import handles
deepytorch.configure(options={"lowering": "aot_eager"})

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))

def fallbacks():
    return [said for region in deepytorch.report().to_json()["regions"] for said in region["fallbacks"]]

def train(model, step, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(float(step(model, number, optimizer)))
    return losses

def same(step, model=None, steps=6, optimizer=lambda model: None):
    "`step` trains an armed model and one in eager alike, the last three steps being ordinary ones."
    def then(model, number, optimizer):
        if number < steps - 3:
            return step(model, number, optimizer)
        loss = model(torch.randn(5, *shape)).square().mean()
        loss.backward()
        optimizer.step(lambda: loss)
        return loss
    torch.manual_seed(0)
    model = model or Net()
    shape = (3, 4, 4) if any(isinstance(each, nn.Conv2d) for each in model.modules()) else (6,)
    other = copy.deepcopy(model)
    losses = train(model, then, steps, optimizer(model))
    assert handles.armed(model)
    with deepytorch.paused():
        expected = train(other, then, steps, optimizer(other))
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for one, two in zip(model.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)

def data(number):
    return torch.randn(5, 6), torch.randn(5, 1)
"""


def run(script: str) -> str:
    done = run_script(f"import deepytorch\n{PREAMBLE}\n{script}", timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def run_alone(script: str, *arguments: str, num_ranks: int | None = None) -> str:
    return run_cold(f"import deepytorch\n{PREAMBLE}\n{script}", *arguments, num_ranks=num_ranks).stdout


def test_a_gradient_penalty_falls_back_and_says_so_once() -> None:
    said = run("""
import logging
logging.basicConfig(level=logging.INFO)
def step(critic, number, optimizer):
    real, fake, share = torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4), torch.rand(5, 1, 1, 1)
    loss = critic(fake).mean() - critic(real).mean()
    if number > 0:
        middle = (share * real + (1 - share) * fake).requires_grad_()
        [slope] = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
        loss = loss + 10 * (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss
critic = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16, 1))
same(step, critic)
assert len(fallbacks()) == 1 and "create_graph=True" in fallbacks()[0]
""")
    assert said.count("a backward with create_graph=True") == 1


@pytest.mark.slow
def test_forward_mode() -> None:
    run_alone("""
def forward_mode(model, number, optimizer):
    x, y = data(number)
    if number == 0:
        loss = model(x).square().mean()
    else:
        tangent = jvp(model, (x,), (y.expand(5, 6),))[1]
        with forward_ad.dual_level():
            other = forward_ad.unpack_dual(model(forward_ad.make_dual(x, y.expand(5, 6).clone()))).tangent
        third = torch.autograd.functional.jvp(model, x, y.expand(5, 6), create_graph=True)[1]
        curve = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x[:2], create_graph=True)
        loss = tangent.square().mean() + other.mean() + third.square().sum() + curve.square().mean()
    loss.backward()
    optimizer.step()
    return loss
same(forward_mode)
""")


@pytest.mark.slow
def test_transforms_before_the_first_training_call() -> None:
    run_alone("""
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = {name: weight.detach() for name, weight in model.named_parameters()}
slopes = grad(lambda weights, x: functional_call(model, weights, (x,)).sum())(weights, torch.randn(3, 6))
assert not handles.armed(model) and slopes["head.bias"].item() == 3
model(torch.randn(3, 6)).sum().backward()
assert handles.armed(model)
""")


@pytest.mark.slow
def test_modes_of_the_users_see_every_call() -> None:
    run_alone("""
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
class Halved(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found / 2 if function is torch.tanh else found
class Named(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
counted = []
def step(model, number, optimizer):
    x, y = data(number)
    if number == 0:
        loss = (model(x) - y).square().mean()
    elif number == 1:
        with Halved():
            loss = (model(x) - y).square().mean()
    else:
        with FlopCounterMode(display=False) as counter, Named() as mode:
            loss = (model(x) - y).square().mean()
        counted.append((counter.get_total_flops(), mode.names))
    loss.backward()
    optimizer.step()
    return loss
torch.set_default_device("cpu")  # this is a mode too, and none of theirs
same(step)
assert counted[0] == counted[1] and counted[0][0] > 0
model = Net()
torch.optim.SGD(model.parameters())
model(torch.randn(2, 6))
assert handles.armed(model)
""")


RANK = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
def step(critic, number, optimizer):
    torch.manual_seed(10 * number + rank)
    real, fake, share = torch.randn(5, 6), torch.randn(5, 6), torch.rand(5, 1)
    loss = critic(torch.cat([real, fake])).square().mean()
    middle = (share * real + (1 - share) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
    loss = loss + (slope.norm(2, dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss
torch.manual_seed(0)
model = Net()
other = copy.deepcopy(model)
losses = train(DistributedDataParallel(model), step, 4)
assert handles.armed(model) and fallbacks()
with deepytorch.paused():
    expected = train(DistributedDataParallel(other), step, 4)
torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
for one, two in zip(model.parameters(), other.parameters()):
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True], ids=["reduced by DDP", "reduced by us"])
def test_a_gradient_penalty_in_a_data_parallel_model(ours: bool) -> None:
    options = {"lowering": "aot_eager", "reduce_gradients": ours}
    run_alone(f"deepytorch.configure(options={options}, process_groups=False)\n{RANK}", num_ranks=2)


PACKED_PENALTY = """
from transformers import LlamaConfig, LlamaForCausalLM
from deepytorch import first_steps
deepytorch.configure(options={"wait": False})
first_steps.ASK_SECONDS, first_steps._TRIED = 0.0, 1 << 30  # packing such a small model does not pay
first_steps.BUDGET.account(1e6 if sys.argv[1] == "graph" else 0.0)  # a trace may take as long as it likes
first_steps._TRACE_SECONDS = first_steps._TRACE_SECONDS_A_MODULE = 0.0 if sys.argv[1] == "graph" else 1e9

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager")

def step(model, number):
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(4, 20, (6, 1), generator=generator)
    real = torch.arange(int(lengths.max())) < lengths
    ids = torch.randint(0, 64, real.shape, generator=generator)
    loss = model(input_ids=ids * real, attention_mask=real.long(), labels=torch.where(real, ids, -100)).loss
    if number >= 8:
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(each.square().sum() for each in gradients)
    loss.backward()
    return loss

def trained():
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(13):
        optimizer.zero_grad()
        step(model, number)
        optimizer.step()
    return list(model.parameters())

found = trained()
report = deepytorch.report().to_json()
with deepytorch.paused():
    for one, two in zip(found, trained()):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
sys.stdout.write(f"packed {sum(region['steps_packed'] for region in report['regions'])}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["entry", "graph"])
def test_a_gradient_penalty_through_packed_rows_before_they_are_compiled(stage: str) -> None:
    """Nothing stands between such a step and autograd: the operators themselves have second derivatives."""
    done = run_alone(f"import sys\n{PACKED_PENALTY}", stage)
    assert int(done.rsplit("packed ", 1)[1]) >= 4, done
