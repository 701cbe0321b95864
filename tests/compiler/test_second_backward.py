"""Backwards that keep their graph: as eager's, in a region that was compiled without knowing of them."""

from __future__ import annotations

import copy
import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamo.graph_forms import graph_for_later
from deepytorch.compiler.dynamo.graph_traits import unread_statistics
from deepytorch.compiler.plan import Plan
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.step import second_backward
from deepytorch.compiler.step.region import Region as CompiledRegion
from deepytorch.compiler.step.regions import compiled_region, whole_region
from deepytorch.compiler.step.second_backward import SecondBackward
from deepytorch.compiler.step.unused_outputs import parts_in_outputs
from deepytorch.passes.graphs import copied
from tests.calls import Calls

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def compiled(model: Any, lowering: str = "aot_eager") -> Any:
    LEDGER.forget()
    return torch.compile(model, backend="deepytorch", options={"lowering": lowering})


def mlp(**kinds: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), kinds.get("middle", nn.Identity()), nn.Linear(8, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4 * 25, 1)
    )


def asked() -> list[str]:
    return [said.partition(": ")[2] for region in LEDGER.report().regions for said in region.fallbacks]


def train(call: Any, model: nn.Module, step: Callable[[Any, int], torch.Tensor], steps: int = 5) -> list[float]:
    """`step(call, number)` does the backward, or gives the loss to do it with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(step(call, number).item())
        optimizer.step()
    return losses


def assert_trains_as_eager(
    model: nn.Module, step: Callable[[Any, int], torch.Tensor], lowering: str = "aot_eager", steps: int = 5
) -> None:
    other = copy.deepcopy(model)
    expected = train(other, other, step, steps)
    losses = train(compiled(model, lowering), model, step, steps)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def penalty_step(shape: tuple[int, ...]) -> Callable[[Any, int], torch.Tensor]:
    """WGAN-GP's critic: the first step has no penalty, so that the region is compiled and has run before it comes."""

    def step(critic: Any, number: int) -> torch.Tensor:
        real, fake, share = torch.randn(shape), torch.randn(shape), torch.rand(shape[0], *[1] * (len(shape) - 1))
        loss = critic(fake).mean() - critic(real).mean()
        middle = (share * real + (1 - share) * fake).requires_grad_(number > 0)
        scores = critic(middle)
        if number > 0:
            [slope] = torch.autograd.grad(scores.sum(), middle, create_graph=True)
            loss = loss + 10 * (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        loss.backward()
        return loss

    return step


# ---------------------------------------------------------------------- what scripts do


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_a_gradient_penalty_on_an_mlp(lowering: str) -> None:
    assert_trains_as_eager(mlp(), penalty_step((4, 6)), lowering)
    assert asked() == ["a backward with create_graph=True; the region runs in eager"]


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_gradient_penalty_through_batch_norm_updates_its_statistics_once(lowering: str) -> None:
    assert_trains_as_eager(cnn(), penalty_step((4, 2, 5, 5)), lowering, steps=4)
    assert asked()


def test_a_gradient_penalty_with_dropout_draws_what_the_step_drew() -> None:
    assert_trains_as_eager(mlp(middle=nn.Dropout(0.4)), penalty_step((4, 6)))
    assert asked()


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_two_losses_with_two_backwards(lowering: str) -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        outputs = call(torch.randn(4, 6))
        outputs.square().mean().backward(retain_graph=number > 0)  # the first compiles it to overwrite what was saved
        if number > 0:
            outputs.abs().mean().backward()
        return outputs.sum()

    assert_trains_as_eager(mlp(), step, lowering)
    assert asked() == ["a backward with retain_graph=True; the region runs in eager"]


def test_a_region_that_always_keeps_its_graph_stays_compiled() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        outputs = call(torch.randn(4, 6))
        outputs.square().mean().backward(retain_graph=True)
        outputs.abs().mean().backward(retain_graph=True)
        outputs.mean().backward()
        return outputs.sum()

    assert_trains_as_eager(mlp(middle=nn.Dropout(0.4)), step)
    assert asked() == []


def model_of(call: Any) -> nn.Module:
    return getattr(call, "_orig_mod", call)


def test_autocast_is_as_it_was_at_the_step() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4, 6, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = call(inputs)
        [slope] = torch.autograd.grad(outputs.float().sum(), inputs, create_graph=True)
        loss = outputs.float().square().mean() + slope.square().sum()
        loss.backward()
        return loss

    assert_trains_as_eager(mlp(), step, steps=1)
    assert asked()


def test_hooks_of_weights_and_inputs_are_called_once() -> None:
    def slopes(call: Any) -> tuple[list[torch.Tensor], list[str]]:
        model, said = model_of(call), []
        inputs = torch.ones(2, 6, requires_grad=True)
        weight = model[0].weight
        weight.grad = None
        before = (inputs * 2).detach().requires_grad_()
        handle = weight.register_hook(lambda g: (said.append("weight"), g * 3)[1])
        before.register_hook(lambda g: (said.append("input"), g * 2)[1])
        loss = call(before).square().sum()
        loss.backward(create_graph=True)
        handle.remove()
        return [weight.grad.detach().clone(), before.grad.detach().clone()], said

    model = mlp()
    expected, order = slopes(copy.deepcopy(model))
    found, said = slopes(compiled(model))
    torch.testing.assert_close(found, expected)
    assert sorted(said) == sorted(order) == ["input", "weight"]


class _Innermost(nn.Module):
    """Convolutions whose gradients come with the channels innermost, as from code that Inductor has laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(images.contiguous(memory_format=torch.channels_last)).relu()).mean((2, 3))


def test_gradients_have_the_layout_of_what_they_are_gradients_of() -> None:
    model, images, seen = _Innermost(), torch.randn(2, 3, 8, 8, requires_grad=True), list[torch.Tensor]()
    call, theirs = compiled(model), copy.deepcopy(model)
    for weight in model.parameters():
        weight.register_hook(lambda gradient: seen.append(gradient.view(-1)))
    call(images).square().sum().backward()
    assert len(seen) == 4
    gradients = torch.autograd.grad(call(images).square().sum(), [images, *model.parameters()])
    expected = torch.autograd.grad(theirs(images).square().sum(), [images, *theirs.parameters()])
    assert not expected[1].is_contiguous()  # without us
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.view(-1), other.reshape(-1))
    theirs.to(memory_format=torch.channels_last)  # by the script: its gradients as well, as in eager
    [gradient] = torch.autograd.grad(compiled(theirs)(images).square().sum(), [theirs.two.weight])
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_a_buffer_that_outputs_depend_on_is_as_it_was_before_the_step() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.calls += 1
            return self.inner(x).tanh() * (self.calls + 0)

    assert_trains_as_eager(Counting(), penalty_step((4, 6)))
    # The first step has two calls before its backward; what the first of them reads from the buffer is held.
    assert asked() == ["a backward with create_graph=True; the region runs in eager"]


# ---------------------------------------------------------------------- what one backward leaves for another


class Parts(nn.Module):
    """A function of two weights and inputs: parts of a model that one region computes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.register_buffer("seen", torch.zeros(()))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def towers(m: Any, x: torch.Tensor) -> Any:
    m.seen += 1
    return F.dropout((x @ m.one).tanh(), 0.3), F.dropout((x @ m.two).tanh(), 0.3)


ANOTHER = "a backward with another one before it through the same call; the region runs in eager"


def test_two_towers_with_a_backward_each() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        one, two = call(torch.randn(4, 6))
        first = (one - two.detach()).square().mean()
        first.backward()
        second = (two - one.detach()).square().mean()
        second.backward()
        return first + 2 * second

    assert_trains_as_eager(Parts(towers), step)
    assert asked() == [ANOTHER]


def test_the_optimizer_of_one_tower_steps_before_the_others_backward() -> None:
    def trained(call: Any, model: nn.Module) -> list[torch.Tensor]:
        optimizers = [torch.optim.SGD([each], lr=0.1) for each in (model.one, model.two)]
        for number in range(4):
            torch.manual_seed(number)
            for each, optimizer in zip(call(torch.randn(4, 6)), optimizers, strict=True):
                each.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    model = Parts(towers)
    other = copy.deepcopy(model)
    torch.testing.assert_close(trained(compiled(model), model), trained(other, other))
    assert asked() == [ANOTHER]


def test_backwards_through_parts_of_what_saves_nothing() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        rows = call(torch.randn(12, 6))
        losses = [rows[:6].square().mean(), rows[6:].abs().mean(), rows[3:9].mean()]
        for loss in losses:
            loss.backward()
        return sum(losses)

    assert_trains_as_eager(Parts(lambda m, x: torch.cat([m.one, m.two]) + x), step)
    assert asked() == [ANOTHER]


def test_many_backwards_through_what_was_gathered_beside_a_loss() -> None:
    """The first of them is of a loss that the region computes, as where a loss is taken part by part."""

    def function(m: Any, x: torch.Tensor) -> Any:
        rows = torch.cat([m.one, m.two])
        return (x @ rows.t()).logsumexp(1).mean(), rows

    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(5, 4, 6)
        loss, rows = call(inputs[0])
        loss.backward()
        for each in inputs[1:]:
            part = (each @ rows.t()).logsumexp(1).mean()
            part.backward()
            loss = loss.detach() + part.detach()
        return loss

    assert_trains_as_eager(Parts(function), step)
    assert asked() == [ANOTHER]


def test_gradients_of_one_loss_for_parts_that_share_nothing() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        loss = call(torch.randn(4, 6))
        model = model_of(call)
        [model.one.grad] = torch.autograd.grad(loss, [model.one])
        loss.backward(inputs=[model.two])
        return loss

    assert_trains_as_eager(Parts(lambda m, x: (x @ m.one).tanh().sum() + (x @ m.two).sigmoid().sum()), step)
    assert asked() == [ANOTHER]


def test_a_penalty_on_one_tower_after_the_others_backward() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        one, two = call(torch.randn(4, 6))
        one.square().mean().backward()
        loss = two.square().mean()
        [slope] = torch.autograd.grad(loss, model_of(call).two, create_graph=True)
        (loss + slope.square().sum()).backward()
        return loss

    assert_trains_as_eager(Parts(towers), step)
    assert asked() == ["a backward with create_graph=True; the region runs in eager"]


@pytest.mark.parametrize("kind", ["a part that both went through", "a weight that was changed"])
def test_a_backward_that_eager_does_not_allow_after_another_one(kind: str) -> None:
    def spoil(call: Any) -> str:
        one, two = call(torch.randn(4, 6))
        one.sum().backward()
        if kind == "a weight that was changed":
            with torch.no_grad():
                model_of(call).two.add_(1)
        with pytest.raises(RuntimeError) as raised:
            two.sum().backward()
        return str(raised.value).partition("(")[0].partition(":")[0]

    def shares(m: Any, x: torch.Tensor) -> Any:
        hidden = (x @ m.one).tanh()
        return hidden @ m.two, hidden.exp() @ m.two

    model = Parts(
        shares if kind == "a part that both went through" else lambda m, x: (x @ m.one, (x @ m.two).exp() @ m.two)
    )
    assert spoil(compiled(model)) == spoil(model)
    assert asked() == []


def test_what_an_unused_output_may_still_ask_for_is_kept_until_its_weights_are_changed() -> None:
    model = Parts(lambda m, x: ((x @ m.one).tanh(), (x @ m.two).tanh()))
    call, losses, seen = compiled(model), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        inputs = torch.randn(4, 6)
        seen.append(weakref.ref(inputs))
        losses.append(call(inputs)[0].sum())  # kept with its graph, as by loops that sum up their losses
        losses[-1].backward()
        del inputs
        assert [each() is None for each in seen] == [True] * number + [False]
        model.two.grad = torch.ones(6, 6)
        optimizer.step()
    assert asked() == []


def test_a_backward_that_compiled_code_fails_in_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        loss = call(torch.randn(4, 6)).square().mean()
        loss.backward()
        return loss

    def fail(*_: Any) -> Any:
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    find = SecondBackward._find_node

    def spoilt(self: SecondBackward, *arguments: Any) -> Any:
        node = find(self, *arguments)
        node._forward_cls.backward = staticmethod(fail)
        return node

    monkeypatch.setattr(SecondBackward, "_find_node", spoilt)
    assert_trains_as_eager(mlp(middle=nn.Dropout(0.4)), step)
    [said] = asked()
    assert "an error in compiled code (RuntimeError: view size is not compatible" in said


def compiled_later(model: Any) -> Any:
    """As in the default mode: by a trace of its own, whose first call sees marked aliases of its inputs."""
    LEDGER.forget()
    config = CompilerConfig.parse(None, {"lowering": "aot_eager", "wait": True})

    def backend(module: Any, inputs: Any) -> Any:
        later = graph_for_later(module, inputs)
        assert not isinstance(later, str), later
        record = LEDGER.open(RegionRecord("region", "declined", "aot_eager"))
        lowering, parts = RegionLowering(config, Plan.initial("region", config)), parts_in_outputs(module.graph)
        return whole_region(later, copied(module).forward, lowering, record, unread_statistics(module.graph), parts)

    return torch.compile(model, backend=backend, dynamic=True)


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_an_input_that_requires_gradients_and_whose_sizes_vary(marked: bool, is_leaf: bool) -> None:
    """Forces: what the energy's gradient is taken by is given to the region, and its sizes are symbols."""

    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4 + number, 6, requires_grad=True)
        given = inputs if is_leaf else inputs * 2
        if marked:
            torch._dynamo.mark_dynamic(given, 0)
        energy = call(given).square().sum(1)
        [forces] = torch.autograd.grad(energy.sum(), inputs, create_graph=True)
        loss = energy.mean() + forces.square().mean()
        loss.backward()
        return loss

    model = mlp(middle=nn.Dropout(0.2))
    other = copy.deepcopy(model)

    def ordinary_first(call: Any, number: int) -> torch.Tensor:
        if number:
            return step(call, number)
        loss = call(torch.randn(4, 6, requires_grad=True)).sum()
        loss.backward()
        return loss

    for steps in (step, ordinary_first):
        expected, found = train(other, other, steps, 2), train(compiled_later(model), model, steps, 2)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.state_dict(), other.state_dict())
        assert steps is ordinary_first or asked() == ["a backward with create_graph=True; the region runs in eager"]


def test_two_towers_whose_sizes_vary() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4 + number, 6, requires_grad=True)
        losses = [each.square().mean() for each in call(inputs)]
        for each in losses:
            each.backward()
        return sum(losses) + inputs.grad.sum()

    model = Parts(towers)
    other = copy.deepcopy(model)
    torch.testing.assert_close(train(compiled_later(model), model, step), train(other, other, step))
    torch.testing.assert_close(model.state_dict(), other.state_dict())
    assert asked() == [ANOTHER]


def test_two_packed_towers_with_a_backward_each() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor, real: torch.Tensor) -> Any:
            share = real[..., None] / real.sum(1, keepdim=True)[..., None]
            return tuple((each(x, src_key_padding_mask=~real) * share).sum(1) for each in (self.one, self.two))

    def step(call: Any, number: int) -> torch.Tensor:
        lengths = torch.randint(2, 12, (6, 1))
        real = torch.arange(int(lengths.max())) < lengths
        one, two = call(torch.randn(*real.shape, 8), real)
        losses = [(one - two.detach()).square().sum(), (two - one.detach()).abs().sum()]
        for each in losses if number > 0 else [sum(losses)]:
            each.backward()
        return sum(losses)

    assert_trains_as_eager(Pair(), step)
    [region] = LEDGER.report().regions
    assert region.outcome == "packed"
    assert region.steps_packed > 0
    assert "a backward with another one before it through the same call" in region.padded_because


# ---------------------------------------------------------------------- shapes of regions


class Region(nn.Module):
    """Whatever a function makes of inputs and one weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.weight, *inputs)


def two_views(weight: torch.Tensor, x: torch.Tensor) -> Any:
    hidden = (x @ weight).tanh()
    return hidden.view(-1), hidden[1:], hidden.t()


REGIONS: dict[str, Callable[..., Any]] = {
    "views of an intermediate": two_views,
    "an output and a view of it": lambda w, x: (lambda h: (h, h[0], h.t()))((x @ w).tanh()),
    "an input among the outputs": lambda w, x: (x, (x @ w).tanh()),
    "a view of an input": lambda w, x: (x.t(), (x @ w).tanh().square()),
    "an output without a gradient": lambda w, x: ((x @ w).tanh(), (x > 0).float(), (x @ w).detach(), x.argmax()),
    "an output twice": lambda w, x: (lambda h: (h, h))((x @ w).tanh()),
    "chunks": lambda w, x: torch.chunk((x @ w).tanh(), 2, dim=-1),
    "a number": lambda w, x: ((x @ w).tanh().sum(), 3, None),
}


def losses_of(outputs: Any) -> torch.Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(
        (place + 1) * each.square().sum()
        for place, each in enumerate(outputs)
        if isinstance(each, torch.Tensor) and each.requires_grad
    )


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("kind", REGIONS)
def test_outputs_of_every_kind_get_second_gradients(kind: str, leaf: bool) -> None:
    def second(call: Any, weight: torch.Tensor, x: torch.Tensor) -> list[Any]:
        inputs = x if leaf else x * 2
        first = torch.autograd.grad(losses_of(call(inputs)), [x, weight], create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), [x, weight])]

    model, x = Region(REGIONS[kind]).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    expected = second(model, model.weight, x)
    torch.testing.assert_close(second(compiled(model), model.weight, x), expected)
    assert asked() == ["a backward with create_graph=True; the region runs in eager"]


def test_an_input_given_twice() -> None:
    def second(call: Any, x: torch.Tensor) -> Any:
        [first] = torch.autograd.grad(losses_of(call(x, x)), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)[0]

    model = Region(lambda w, x, y: (x @ w).tanh() * y)
    x = torch.randn(4, 6, requires_grad=True)
    expected = second(model, x)
    torch.testing.assert_close(second(compiled(model), x), expected)
    assert asked()


def test_an_input_that_the_region_writes_into() -> None:
    def second(call: Any, x: torch.Tensor) -> Any:
        given = x * 2
        outputs = call(given)
        [first] = torch.autograd.grad(losses_of(outputs) + given.square().sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)[0]

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x.sigmoid_()
        return (x @ weight).tanh()

    model, x = Region(function), torch.randn(4, 6, requires_grad=True)
    expected = second(model, x)
    call = compiled(model)
    torch.testing.assert_close(second(call, x), expected)
    assert asked()


def test_an_expanded_input_is_not_copied() -> None:
    """Packed batches carry the longest row's length so, as an expanded tensor that would fill the machine if copied."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * carrier[0, 0]

    model = Scaled()
    call = compiled(model)
    carrier = torch.ones(4).expand(8192, 8192, 4)  # 1 GiB, copied
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        call(torch.randn(2, 4), carrier).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_inputs_that_share_memory_and_are_written_into() -> None:
    """The node of such a region has other edges than its inputs, so that it cannot be watched: eager from the first."""

    def second(call: Any, x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        rows = x * 2
        first = call(rows[:4], rows[2:])
        [slope] = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first, slope, torch.autograd.grad(slope.square().sum(), x)[0], torch.rand(2)

    def function(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.dropout((x.clone() @ weight).tanh(), 0.4) * y.mul_(1.0)

    model, x = Region(function), torch.randn(6, 6, requires_grad=True)
    expected = second(model, x)
    call = compiled(model)
    torch.testing.assert_close(second(call, x), expected)
    assert asked() == ["a backward with inputs that cannot be watched for what else it asks; the region runs in eager"]


def test_a_node_that_is_not_known_leaves_its_region_to_eager_from_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(second_backward, "_is_of_call", lambda node, call: False)
    assert_trains_as_eager(mlp(middle=nn.Dropout(0.4)), penalty_step((4, 6)))
    assert set(asked()) == {
        "a backward with a graph that cannot be watched for what else it asks; the region runs in eager"
    }


def test_a_teacher_that_its_own_region_moves() -> None:
    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    one.lerp_(other, 0.1)
            return (self.student(x) - self.teacher(x)).square().mean(1)

    assert_trains_as_eager(Teaching(), penalty_step((4, 6)))
    assert asked()


def test_outputs_may_be_changed_in_place() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4, 6, requires_grad=True)
        outputs = call(inputs)
        outputs.mul_(2).add_(1)
        outputs[0] = 0
        if number == 0:
            loss = outputs.square().mean()
        else:
            [slope] = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
            loss = slope.square().mean()
        loss.backward()
        return loss

    assert_trains_as_eager(Region(lambda w, x: x @ w), step)
    assert asked()


def test_a_checkpoint_around_the_region() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4, 6, requires_grad=True)
        loss = torch.utils.checkpoint.checkpoint(call, inputs, use_reentrant=False).square().sum()
        if number > 0:
            [slope] = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + slope.square().sum()
        loss = loss + torch.utils.checkpoint.checkpoint(call, inputs.detach(), use_reentrant=False).sum()
        loss.backward()
        return loss

    assert_trains_as_eager(Region(lambda w, x: (x @ w).tanh()), step)
    assert asked()


def test_inputs_that_a_checkpoint_has_done_with_are_not_kept() -> None:
    call = compiled(Region(lambda w, x: (x @ w).exp()))
    seen = []

    def part(x: torch.Tensor) -> torch.Tensor:
        between = x * 2
        seen.append(weakref.ref(between))
        return call(between)

    loss = torch.utils.checkpoint.checkpoint(part, torch.randn(4, 6, requires_grad=True), use_reentrant=False).sum()
    assert seen[0]() is None
    loss.backward()


def test_a_region_called_several_times_within_a_step() -> None:
    def step(call: Any, number: int) -> torch.Tensor:
        inputs = torch.randn(4, 6, requires_grad=True)
        hidden = call(call(call(inputs)))
        loss = hidden.square().mean()  # of sums, eager itself goes 0.03 astray where weights move in their last bit
        if number > 0:
            [slope] = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + slope.square().mean()
        loss.backward()
        return loss

    assert_trains_as_eager(Region(lambda w, x: (x @ w).tanh()), step)
    assert asked()


def test_a_model_cut_into_several_regions() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.one(x).tanh()
            torch._dynamo.graph_break()
            return self.two(hidden.square())

    assert_trains_as_eager(Cut(), penalty_step((4, 6)))
    assert len(asked()) >= 2


def test_an_input_overwritten_since_is_the_error_that_eager_gives() -> None:
    model, inputs = mlp(), torch.randn(4, 6)

    def spoil(call: Any) -> str:
        loss = call(inputs).sum()
        inputs.zero_()
        with pytest.raises(RuntimeError) as raised:
            loss.backward(create_graph=True)
        return str(raised.value)

    for said in (spoil(model), spoil(compiled(model))):
        assert "modified by an inplace operation: [torch.FloatTensor [4, 6]]" in said


def test_a_third_backward_without_a_graph_is_the_error_that_eager_gives() -> None:
    for call in (mlp(), compiled(mlp())):
        loss = call(torch.randn(4, 6)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_random_numbers_go_on_as_if_nothing_was_run_again() -> None:
    def after(call: Any) -> torch.Tensor:
        torch.manual_seed(3)
        call(torch.ones(2, 6)).sum().backward(create_graph=True)
        return torch.rand(3)

    model = mlp(middle=nn.Dropout(0.5))
    torch.testing.assert_close(after(compiled(model)), after(model))
    assert asked()


# ---------------------------------------------------------------------- what it costs


@pytest.fixture
def _no_collection() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["dropped", "backward", "retained", "differentiated"])
@pytest.mark.usefixtures("_no_collection")
def test_a_call_keeps_nothing_alive_behind_its_backward(ends: str) -> None:
    model = mlp(middle=nn.BatchNorm1d(8))
    call = compiled(model)
    call(torch.randn(4, 6)).sum().backward()
    LEDGER.forget()
    inputs = torch.randn(4, 6)
    seen = weakref.ref(inputs)
    loss = call(inputs).sum()
    node = weakref.ref(loss.grad_fn.next_functions[0][0])
    del inputs
    assert seen() is not None
    if ends == "retained":
        loss.backward(retain_graph=True)
        assert seen() is not None
    if ends == "differentiated":
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in slopes).backward()
        del slopes
        model.zero_grad()
    if ends in ("backward", "retained"):
        loss.backward()
        assert seen() is None  # though the loss, and with it the node, is still there
    del loss
    assert seen() is None
    assert node() is None


def test_a_region_without_gradients_is_not_watched() -> None:
    lowering = RegionLowering(CompilerConfig(), Plan.initial("region", CompilerConfig()))
    record = RegionRecord("region", "declined", "aot_eager")
    region = compiled_region(lambda x: (x + 1,), 1, lambda x: (x + 1,), lowering, record)
    region(torch.ones(2))
    assert region._padded._second._blind
    assert region._padded._second.begin([torch.ones(2)], lambda x: (x,)) is None


@pytest.mark.parametrize("count", [40, 300])
def test_an_ordinary_call_costs_the_host_little(count: int) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count - 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.cat(list(self.weights)).sum()

    regions: list[CompiledRegion] = []
    begin = CompiledRegion.__call__

    def caught(self: CompiledRegion, *inputs: Any) -> Any:
        regions.append((self, inputs))
        return begin(self, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledRegion, "__call__", caught)
        compiled(Wide())(torch.ones(1))
    [(region, inputs)] = regions
    assert len(inputs) == count
    region(*inputs)  # the first call looks at its inputs
    with Calls() as before:
        call = region._padded._second.begin(inputs, region._eager)
    outputs = region._padded._code(inputs)
    with Calls() as behind:
        region._padded._second.watch(call, outputs)
    assert outputs[0].grad_fn.apply.__self__ is not outputs[0].grad_fn
    assert 0 < before.count + behind.count < 50  # however many inputs there are


# ---------------------------------------------------------------------- which writes do not matter


def test_statistics_that_no_output_depends_on() -> None:
    found = []

    def look(module: Any, inputs: Any) -> Any:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        found.append({names[place] for place in unread_statistics(module.graph)})
        return module.forward

    model = cnn()
    torch.compile(model, backend=look)(torch.randn(4, 2, 5, 5))
    assert len(found[0]) == 3
    assert all("running" in name or "num_batches" in name for name in found[0])
    model[1].eval()
    torch.compile(model, backend=look)(torch.randn(4, 2, 5, 5))
    assert found[1] == set()
