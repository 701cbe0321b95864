"""Reading and editing of FX graphs, for passes and for the compiler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from deepytorch.torch_internals import OpOverload, detect_fake_mode

aten = torch.ops.aten

PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the module with a graph of its own, and the same parameters."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by name, with defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    found = {each.name: each.default_value for each in schema}
    found.update(zip((each.name for each in schema), node.args, strict=False))
    return {**found, **node.kwargs}


def call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """Add a call of an operator with its value: that of the arguments' values, computed in their fake mode.

    No size is guarded on. Without a fake mode the node gets no value. like: a node whose value has the fake mode, for
    calls whose arguments hold numbers only.
    """
    node = graph.call_function(target, args, kwargs)
    values: Any = fx.map_arg((args, kwargs or {}), lambda each: each.meta["val"])
    mode = detect_fake_mode((values, None if like is None else like.meta["val"]))
    if mode is not None:
        with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext():
            node.meta["val"] = target(*values[0], **values[1])
    return node


def drop_unread_inputs(graph: fx.Graph, count: int | None = None) -> tuple[int, ...]:
    """Erase the inputs that no node reads, of the first `count` or of all; return the places of those that stay."""
    kept = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(placeholders[:count]):
        if node.users:
            kept.append(place)
        else:
            graph.erase_node(node)
    return tuple(kept)


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers when it runs."""
    if node.target is aten.dropout.default:
        return bool(node.args[2]) and node.args[1] != 0
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def keeps_all(node: fx.Node) -> bool:
    """Return whether a node is an attention without dropout: its operator could draw, and does not."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    return (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) == 0.0


def is_packed(module: fx.GraphModule) -> bool:
    """Return whether a graph, or one nested in it, has attention over packed rows."""
    packed = torch.ops.deepytorch.varlen_attention.default
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return any(node.target is packed for graph in graphs for node in graph.nodes)


def match_softcap(node: fx.Node) -> tuple[float, fx.Node, list[fx.Node]] | None:
    """Match `cap * tanh(x / cap)`, which ends in `node`; return the cap, x, and the two nodes between."""
    if node.target not in PRODUCTS:
        return None
    tanh, cap = node.args[0], number_of(node.args[1])
    if cap is None or cap <= 0 or not isinstance(tanh, fx.Node) or tanh.target is not aten.tanh.default:
        return None
    quotient = tanh.args[0]
    if not isinstance(quotient, fx.Node) or quotient.target not in QUOTIENTS or number_of(quotient.args[1]) != cap:
        return None
    source = quotient.args[0]
    return (float(cap), source, [tanh, quotient]) if isinstance(source, fx.Node) else None


def number_of(value: Any) -> float | None:
    """Return a Python number, or the number in a 0-d constant; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, fx.Node):
        if value.target in (aten.lift_fresh_copy.default, aten.detach_.default, aten.to.dtype, aten._to_copy.default):
            return number_of(value.args[0])
        if value.target in (aten.full.default,) and value.args[0] == []:
            return number_of(value.args[1])
        if value.target is aten.scalar_tensor.default:
            return number_of(value.args[0])
        if value.op == "get_attr":
            constant = getattr(value.graph.owning_module, value.target, None)
            if isinstance(constant, torch.Tensor) and constant.dim() == 0:
                return float(constant.item())
    return None
