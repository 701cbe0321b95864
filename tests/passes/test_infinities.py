"""Which values may be infinite at pads, so that zero times them is no zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.infinities import may_be_infinite

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

INFINITE: dict[str, Function] = {
    "filled": lambda x, w, mask: x.masked_fill(mask == 0, float("-inf")),
    "filled, and then more": lambda x, w, mask: x.masked_fill(mask == 0, float("inf")) @ w,
    "no number": lambda x, w, mask: torch.where(mask > 0, x, float("nan")),
    "made": lambda x, w, mask: torch.where(mask > 0, x, torch.full_like(x, float("inf"))),
    "logarithm": lambda x, w, mask: (x @ w).log(),
    "reciprocal": lambda x, w, mask: (x @ w).reciprocal(),
    "quotient": lambda x, w, mask: x / (x @ w),
}
FINITE: dict[str, Function] = {
    "filled with a number": lambda x, w, mask: x.masked_fill(mask == 0, -1e9),
    "layer norm by hand": lambda x, w, mask: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "normalised": lambda x, w, mask: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "scaled": lambda x, w, mask: x / 8.0 + torch.softmax(x, -1),
    "mean of tokens": lambda x, w, mask: x / mask.sum(),
    "logarithm of what is not zero": lambda x, w, mask: (x.sigmoid() + 1e-6).log(),
}


def is_infinite(function: Function) -> bool:
    traced = make_fx(function, pre_dispatch=True)(torch.ones(3, 4), torch.ones(4, 4), torch.ones(3, 1))
    roles = (Role.BATCH, Role.PARAMETER, Role.BATCH)
    for node, name, role in zip(traced.graph.nodes, ("x", "w", "mask"), roles, strict=False):
        node.meta["input"] = GraphInput(name, role)
    # what a model computes from its weights and the batch: x is no batch of ids here
    [x, *_] = traced.graph.nodes
    x.meta["input"] = GraphInput("x", Role.PARAMETER)
    last: fx.Node = next(node for node in traced.graph.nodes if node.op == "output").args[0]  # type: ignore[assignment]
    return last in may_be_infinite(traced.graph, Slicer(traced.graph), [])


@pytest.mark.parametrize("name", INFINITE)
def test_what_may_be_infinite(name: str) -> None:
    assert is_infinite(INFINITE[name])


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite(name: str) -> None:
    assert not is_infinite(FINITE[name])
