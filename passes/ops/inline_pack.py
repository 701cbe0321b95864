"""Replacement of `pack_rows` and `unpack_rows` in graphs after autograd, so that Inductor fuses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from deepytorch.passes.ops import pack  # noqa: F401, registers the operators
from deepytorch.torch_internals import detect_fake_mode


def inline_pack(graph: fx.Graph) -> int:
    """Replace every pack and unpack in `graph`, in place, by indexing that Inductor lowers without atomics.

    Args:
        graph: a forward or backward graph after AOTAutograd, functional, with `meta["val"]` on its nodes.

    Returns:
        The number of nodes that were replaced.
    """
    inlined = {
        torch.ops.deepytorch.pack_rows.default: _inline_pack,
        torch.ops.deepytorch.unpack_rows.default: _inline_unpack,
    }
    replaced = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in inlined:
            with graph.inserting_before(node):
                new = inlined[node.target](graph, node)
            new.meta.update({key: value for key, value in node.meta.items() if key not in new.meta})
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            replaced += 1
    return replaced


def _inline_pack(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, indices = node.args
    assert isinstance(x, fx.Node)
    return _call(graph, x, torch.ops.aten.index.Tensor, x, [indices])


def _inline_unpack(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, indices, num_rows = node.args
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    sizes = [_size(graph, x, dim) for dim in range(1, value.dim())]
    zeros = _call(graph, x, torch.ops.aten.full.default, [num_rows, *sizes], 0, dtype=value.dtype, device=value.device)
    return _call(graph, x, torch.ops.aten.index_put.default, zeros, [indices], x, False)


def _size(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    size = x.meta["val"].size(dim)
    return size if isinstance(size, int) else _call(graph, x, torch.ops.aten.sym_size.int, x, dim)


def _call(graph: fx.Graph, x: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Add a node of `target`, with its value on the fake values of the arguments, in the fake mode of `x`."""
    node = graph.call_function(target, args, kwargs)
    values: tuple[Any, ...]
    named: dict[str, Any]
    values, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with detect_fake_mode(x.meta["val"]) or nullcontext():
        node.meta["val"] = target(*values, **named)
    return node
