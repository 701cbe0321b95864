"""Writes in place: replaced where all reads see the same values, with the same gradients, and else left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from deepytorch.passes.functional import without_writes
from deepytorch.passes.slicing import writes_in_place

Function = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def weights_made_one(x: Tensor) -> Tensor:
    top, _ = torch.topk(x, 2, dim=-1)
    top /= top.sum(-1, keepdim=True)
    return top.exp()


def groups_masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    mask.scatter_(1, x.argsort(-1)[:, :2], 1)
    return x.masked_fill(~mask.bool(), -2.0).exp()


def several_writes(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).mul_(x)
    y[x > 0] = 3.0
    y.masked_fill_(x < -1, 0.0)
    y.clamp_(max=2.5)
    return y * x


def reads_between(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 5
    before = y + 2
    y.add_(x)
    between = y - 3
    y.sub_(x, alpha=2)
    return before, between, y


def index_inverted(x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return x[order].sin()[inverse]


def added_by_index(x: Tensor) -> Tensor:
    total = torch.zeros(3, x.shape[1], dtype=x.dtype)
    total.index_add_(0, torch.arange(5) % 3, x)
    return total.exp()


def cast_into(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32)
    y.copy_(x * 2)
    return y.exp()


def copied_before_its_source_changes(x: Tensor) -> Tensor:
    z = x.detach() + 1
    y = torch.empty_like(z)
    y.copy_(z)
    z.add_(1)
    return y * z * x


def views_on_one_side(x: Tensor) -> Tensor:
    y = x * 2
    before = y.t() + 1
    y.add_(x)
    return before.t() * y.reshape(-1, 1).view_as(x)


def parts_filled(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 6)
    y[..., 4:] = x[:, :2] * 3
    y[..., :4] = x.exp()
    return y * 2


def parts_broadcast(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 6)
    y[:, :4] = x
    y[:, 4:] = x[:, :1]
    return y * 2


REPLACED: list[Function] = [
    weights_made_one, groups_masked, several_writes, reads_between, index_inverted, added_by_index, cast_into,
    copied_before_its_source_changes, views_on_one_side, parts_filled, parts_broadcast,
]  # fmt: skip


def view_across_the_write(x: Tensor) -> Tensor:
    y = x * 2
    view = y.t()
    y.add_(1)
    return view * 3


def through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1].add_(1)
    return y.exp()


def behind_the_back_of_gradients(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y * x


def into_the_input(x: Tensor) -> Tensor:
    y = x.detach()
    y.add_(1)
    return y * 2


def of_a_wider_dtype(x: Tensor) -> Tensor:
    y = x.to(torch.float32) * 2
    y.mul_(x)
    return y.exp()


def parts_without_gradients(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 6)
    with torch.no_grad():
        y[:, :4] = x
    y[:, 4:] = x[:, :2]
    return y * 2


def parts_whose_source_changes(x: Tensor) -> Tensor:
    z = x.detach() + 1
    y = x.new_empty(x.shape[0], 8)
    y[:, :4] = z
    z.view(-1).add_(5)
    y[:, 4:] = z
    return y * x.repeat(1, 2)


def parts_with_a_gap(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 6)
    y[:, :2] = x[:, :2]
    y[:, 3:] = x[:, 1:]
    return y[:, 3:] * 2


def parts_that_overlap(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 6)
    y[:, :4] = x
    y[:, 3:] = x[:, 1:]
    return y * 2


LEFT: list[Function] = [
    view_across_the_write, through_a_view, behind_the_back_of_gradients, into_the_input, of_a_wider_dtype,
    parts_with_a_gap, parts_that_overlap, parts_without_gradients, parts_whose_source_changes,
]  # fmt: skip


def results(function: Callable[..., object], x: Tensor) -> list[Tensor]:
    """The outputs, and the gradient of the input for their sum."""
    x = x.clone().requires_grad_()
    given = function(x)
    outputs = list(given) if isinstance(given, (tuple, list)) else [given]
    total = sum(each.double().sum() for each in outputs if each.is_floating_point())
    return [*outputs, *([torch.autograd.grad(total, x)[0]] if total.requires_grad else [])]  # type: ignore[union-attr]


@pytest.mark.parametrize("function", [*REPLACED, *LEFT])
def test_values_and_gradients_stay(function: Function) -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(x.clone().requires_grad_())
    assert any(map(writes_in_place, traced.graph.nodes)), "the case has nothing to replace"
    found = without_writes(traced)
    left = [node for node in found.graph.nodes if writes_in_place(node)]
    assert bool(left) == (function in LEFT), left
    assert (found is traced) == (function in LEFT)
    for ours, theirs in zip(results(found, x), results(function, x), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
