"""Custom autograd functions: those whose backward is the derivative of their forward are traced, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.compiler.dynamo.custom_functions import find_derivatives
from tests.compiler.parity import COMPILED, Pair, batches, causal_batch, declined, expect_packed, mixture
from tests.compiler.plain_models import Plain, sdpa_bool


def tanh_of(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))


class ByHand(torch.autograd.Function):
    """GELU, with a backward by hand whose constants are rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + tanh_of(x))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        t = tanh_of(x)
        return gradient * (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t))


class FromResult(torch.autograd.Function):
    """An exponential that keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return -2 * x * y * gradient


class Of(torch.autograd.Function):
    """A sine; each of its kinds has a backward of its own, none of them its derivative."""

    kind = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @classmethod
    def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Straight(Of):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0.0


class Nearly(Of):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x) * 1.00001


class Squashed(Of):
    """Right for small gradients alone."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.tanh(gradient) * torch.cos(x)


class Bounded(Of):
    """Right where the gradient is small: `minimum` is no analytic function."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.clamp(torch.cos(x), -2.0, 2.0)


class OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


def graph_of(function: Any) -> torch.fx.GraphModule:
    """Dynamo's graph of a function of one tensor, its sizes symbols."""
    found: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(module)
        return module

    torch.compile(function, backend=keep, dynamic=True, fullgraph=True)(torch.randn(3, 5, requires_grad=True))
    return found[0]


KNOWN = {"by hand": ByHand.apply, "from its result": FromResult.apply}
OTHERS = {
    "straight through": Straight.apply,
    "nearly": Nearly.apply,
    "squashed gradients": Squashed.apply,
    "bounded": Bounded.apply,
    "of two": lambda x: OfTwo.apply(x, 2 * x),
}


@pytest.mark.parametrize("function", KNOWN.values(), ids=KNOWN)
def test_a_backward_that_is_the_derivative(function: Any) -> None:
    [derived] = find_derivatives(graph_of(lambda x: function(2 * x).sum())).values()
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    wanted, found = function(x), derived.forward(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    gradients = (torch.autograd.grad(each.sin().sum(), x)[0] for each in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_a_backward_that_says_something_else(function: Any) -> None:
    assert find_derivatives(graph_of(lambda x: function(2 * x).sum())) == {}


class Activated(Plain):
    """A transformer with a function behind its blocks."""

    def __init__(self, function: Any) -> None:
        super().__init__(sdpa_bool)
        self.norm = nn.Sequential(self.norm, Calls(function))


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.slow
def test_a_model_with_a_derivative_by_hand_is_packed() -> None:
    expect_packed(Pair(Activated(ByHand.apply).train(), options=COMPILED).train(batches(causal_batch, *mixture())))


def test_a_model_with_another_backward_is_left_to_stock() -> None:
    report = Pair(Activated(Straight.apply).train()).train(batches(causal_batch, (4, 11, "right"), (3, 9, "left")))
    assert report.total("steps_packed") == 0
    assert "autograd_function_apply is left to stock" in declined(report)


class Layer(torch.autograd.Function):
    """A layer that saves inputs, its result and a value on the way; its backward is not quite its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        between = x @ weight
        result = torch.tanh(between)
        ctx.save_for_backward(x, weight, result, between)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, result, between = ctx.saved_tensors
        gradient = gradient * (1 - result * result) + 0.01 * between * gradient
        return gradient @ weight.t(), x.t() @ gradient


class WithLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Layer.apply(x, self.weight).sin().square().mean()


@pytest.mark.parametrize("lowering", ["aot_eager", "eager"])
def test_the_gradient_of_a_gradient_goes_through_what_a_function_saves(lowering: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = WithLayer()
    compiled = torch.compile(model, backend="deepytorch", options={"lowering": lowering})
    for number in range(3):
        found = []
        for call in (model, compiled):
            model.zero_grad()
            loss = call(torch.full((4, 8), 0.3 + number))
            (gradient,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
            (loss + 10 * gradient.square().sum()).backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad)
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
