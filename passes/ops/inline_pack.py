"""Replacement of `pack_rows` and `unpack_rows` in graphs after autograd, so that Inductor fuses them."""

from __future__ import annotations

import torch
from torch import fx

from deepytorch.passes.graphs import call
from deepytorch.passes.ops import pack  # noqa: F401, registers the operators


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
    return call(graph, torch.ops.aten.index.Tensor, (x, [indices]))


def _inline_unpack(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, indices, num_rows = node.args
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    sizes = [_size(graph, x, dim) for dim in range(1, value.dim())]
    named = {"dtype": value.dtype, "device": value.device}
    zeros = call(graph, torch.ops.aten.full.default, ([num_rows, *sizes], 0), named, like=x)
    return call(graph, torch.ops.aten.index_put.default, (zeros, [indices], x, False))


def _size(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    size = x.meta["val"].size(dim)
    return size if isinstance(size, int) else call(graph, torch.ops.aten.sym_size.int, (x, dim))
