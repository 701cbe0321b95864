"""Custom autograd functions whose backward is the derivative of their forward.

Such a function was written to save memory or time (GELU with a backward by hand), and its forward alone, differentiated
by autograd, trains the same. Only then may a trace of the forward stand for the function. A backward that says
something else (straight-through estimators, bounded gradients) is left to stock.

[Note: how it is proved]
Forward and backward are compositions of analytic functions of one tensor, entry by entry, without branches. Two such
functions that agree on an interval agree wherever they are defined, so both are evaluated in fp64 at every number of
half precision: thousands of points in each power of two.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_ANALYTIC = frozenset({
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.tanh, torch.exp, torch.sigmoid, torch.erf, torch.sin,
    torch.cos,
})  # fmt: skip
_POWERS = frozenset({operator.pow, torch.pow})
_SAME = 1e-6  # constants of a backward by hand are rounded
_NONE = 1e-9  # of the largest derivative between -1 and 1: a value that small is rounding where others cancel
_FINITE = 64.0  # up to here, both have to be finite
_SCALES = (1.0, -2.5, 1e-6, 1e6)


@dataclass(frozen=True, slots=True)
class Derived:
    """The forward of a custom function, for autograd to differentiate: it takes one tensor and returns one, as large.

    place: of that tensor among the function's arguments. The others are sizes, which nothing is computed from.
    """

    forward: fx.GraphModule
    place: int


def find_derivatives(module: fx.GraphModule) -> dict[fx.GraphModule, Derived]:
    """Return the custom functions in a graph of Dynamo's whose backward is the derivative of their forward.

    The keys are the forwards as Dynamo has them. To be called outside of tracing: numbers are computed.
    """
    found: dict[fx.GraphModule, Derived] = {}
    seen: dict[tuple[str, str], Derived | None] = {}
    for part in (each for each in module.modules() if isinstance(each, fx.GraphModule)):
        for node in part.graph.nodes:
            if node.target is not torch.ops.higher_order.autograd_function_apply:
                continue
            forward, backward = (_held(part, node, place) for place in (0, 1))
            if forward is None or backward is None or node.kwargs.get("non_differentiable_idx"):
                continue
            written = forward.code, backward.code
            if written not in seen:
                seen[written] = _derived(forward, backward)
            derived = seen[written]
            if derived is not None and derived.place + 2 < len(node.args):
                found[forward] = derived
    return found


def _held(part: fx.GraphModule, node: fx.Node, place: int) -> fx.GraphModule | None:
    given = node.args[place] if place < len(node.args) else None
    body = getattr(part, str(given.target), None) if isinstance(given, fx.Node) else None
    return body if isinstance(body, fx.GraphModule) else None


def _derived(forward: fx.GraphModule, backward: fx.GraphModule) -> Derived | None:
    if not (_is_analytic(forward) and _is_analytic(backward)):
        return None
    inputs = _inputs(forward)
    read = [place for place, node in enumerate(inputs) if any(user.op != "output" for user in node.users)]
    results = _output(forward)
    if len(read) != 1 or not isinstance(results, tuple) or len(results) != 2:
        return None
    [place] = read
    shown = results[0] if isinstance(results[0], tuple) else (results[0],)
    if len(shown) != 1 or not isinstance(shown[0], fx.Node) or not isinstance(results[1], tuple):
        return None
    alone = _part(forward, inputs[place], shown[0])
    kept: list[fx.GraphModule | None] = []
    for node, value in zip(_inputs(backward)[1:], results[1], strict=False):
        if node.users:
            if not isinstance(value, fx.Node) or (value in inputs and value is not inputs[place]):
                return None
            kept.append(_part(forward, inputs[place], value))
        else:
            kept.append(None)  # a size, or a value that the backward has no use for
    if len(kept) != len(results[1]) or len(kept) + 1 != len(_inputs(backward)):
        return None
    gradients = _output(backward)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    if [index for index, value in enumerate(gradients) if value is not None] != [place]:
        return None
    return Derived(alone, place) if _is_derivative(alone, kept, backward, place) else None


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _output(module: fx.GraphModule) -> Any:
    return next(iter(reversed(module.graph.nodes))).args[0]


def _is_analytic(module: fx.GraphModule) -> bool:
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output") or _switches_gradients(node):
            continue
        if node.op != "call_function" or node.kwargs:
            return False
        if node.target in _POWERS:
            if not isinstance(node.args[1], int) or node.args[1] < 0:
                return False
        elif node.target not in _ANALYTIC:
            return False
    return True


def _switches_gradients(node: fx.Node) -> bool:
    return "set_grad_enabled" in getattr(node.target, "__name__", "")


def _part(forward: fx.GraphModule, x: fx.Node, result: fx.Node) -> fx.GraphModule:
    """Return one of the forward's values as a function of `x`, with gradients on."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {x: graph.placeholder("x")}
    for node in forward.graph.nodes:
        if node.op == "call_function" and not _switches_gradients(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)


def _is_derivative(
    alone: fx.GraphModule, saved: list[fx.GraphModule | None], backward: fx.GraphModule, place: int
) -> bool:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    x = halves[halves.isfinite()].double()
    with torch.enable_grad():
        x.requires_grad_()
        y = alone(x)
        if not y.requires_grad:
            return False
        [wanted] = torch.autograd.grad(y.sum(), x)
    x = x.detach()
    near, middle = x.abs() <= 1, x.abs() <= _FINITE
    with torch.no_grad():
        kept = [None if part is None else part(x) for part in saved]
        floor = _NONE * wanted[near].abs().max()
        for scale in _SCALES:
            found = _gradient(backward, torch.full_like(x, scale), kept, place)
            finite = found.isfinite() & wanted.isfinite()
            off = (found / scale - wanted).abs() > _SAME * wanted.abs() + floor
            if not finite[middle].all() or (off & finite).any():
                return False
    return True


def _gradient(backward: fx.GraphModule, of_result: Tensor, kept: list[Tensor | None], place: int) -> Tensor:
    try:
        found = backward(of_result, *kept)
    finally:
        torch.set_grad_enabled(False)  # the graph has switched them on at its end
    gradient: Tensor = found[place] if isinstance(found, tuple) else found
    return gradient
