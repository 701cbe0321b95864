"""Symbols of rows and positions, and unification of sizes that must agree.

Dynamo gives every input symbols of its own. Each comparison of two symbols here becomes a guard, so that a later batch
in which the two differ is compiled anew instead of being misread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.passes.base import Context, Role
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.layout import Symbols, expression
from deepytorch.passes.unpad.region import Declined, Space


def seed(attentions: list[Attention], context: Context) -> tuple[sympy.Symbol, list[sympy.Symbol]]:
    """Return the symbols of rows and of positions, as the attentions' operands show them."""
    env = context.shape_env
    rows: list[sympy.Symbol] = []
    positions: list[sympy.Symbol] = []
    for attention in attentions:
        query, key = attention.query.meta["val"], attention.key.meta["val"]
        q_dim, k_dim = -2, -1 if attention.key_is_transposed else -2
        if query.dim() < 3 or key.dim() < 3:
            continue
        first = expression(query.shape[0], env)
        symbols = list(first.free_symbols)
        if len(symbols) == 1 and (first / symbols[0]).is_Integer:
            rows.append(symbols[0])
        for size in (expression(query.shape[q_dim], env), expression(key.shape[k_dim], env)):
            if size.is_Symbol and size not in positions:
                positions.append(size)
    if not rows or not positions:
        raise Declined("rows or positions have fixed sizes in this graph (a batch of one row, or dynamic=False)")
    return rows[0], [symbol for symbol in positions if symbol != rows[0]]


def unify_masks(
    graph: fx.Graph, slicer: Slicer, attentions: list[Attention], rows: sympy.Symbol, context: Context
) -> None:
    """Unify sizes that must agree: a mask has the rows and the positions of the keys that it masks."""
    env = context.shape_env
    sizes = _input_sizes(graph, env)
    for attention in attentions:
        key = attention.key.meta["val"].shape[-1 if attention.key_is_transposed else -2]
        columns = [expression(key, env), expression(attention.query.meta["val"].shape[-2], env)]
        for term in attention.terms:
            for leaf in slicer.inputs_read([term.node]):
                _match_sizes(leaf, sizes, rows, columns, env)


def unify_labels(
    graph: fx.Graph,
    slicer: Slicer,
    losses: list[fx.Node],
    rows: sympy.Symbol,
    positions: list[sympy.Symbol],
    context: Context,
) -> None:
    """Unify the sizes of labels with the rows and the positions of the logits, as `unify_masks` does for masks."""
    env = context.shape_env
    sizes = _input_sizes(graph, env)
    for loss in losses:
        free: set[Any] = set()
        for size in loss.args[0].meta["val"].shape:
            free |= expression(size, env).free_symbols
        if isinstance(loss.args[1], fx.Node) and slicer.from_batch(loss.args[1]):
            for leaf in slicer.inputs_read([loss.args[1]]):
                _match_sizes(leaf, sizes, rows, [symbol for symbol in positions if symbol in free], env)


def _input_sizes(graph: fx.Graph, env: Any) -> dict[sympy.Expr, torch.SymInt]:
    """Return a symbolic integer for every symbol that is the size of some input."""
    sizes: dict[sympy.Expr, torch.SymInt] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            for size in node.meta["val"].shape:
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(expression(size, env), size)
    return sizes


def _match_sizes(
    leaf: fx.Node, sizes: Mapping[sympy.Expr, torch.SymInt], rows: sympy.Symbol, columns: Iterable[sympy.Expr], env: Any
) -> None:
    value = leaf.meta["val"]
    if leaf.meta["input"].role is not Role.BATCH or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return
    for index, size in enumerate(value.shape):
        for known in [rows] if index == 0 else columns:
            other = sizes.get(known)
            if not isinstance(size, torch.SymInt) or other is None or expression(size, env) in (rows, *columns):
                break
            if size.node.hint == other.node.hint:
                bool(size == other)  # the comparison is the guard
                break


def spaces_of(graph: fx.Graph, symbols: Symbols, positions: list[sympy.Symbol]) -> dict[sympy.Symbol, Space]:
    """Give each token space a number, and find an input from which the sizes of each can be read."""
    spaces: dict[sympy.Symbol, Space] = {}
    for symbol in positions:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            sizes = [symbols.expr(size) for size in value.shape]
            if symbols.rows in sizes and symbol in sizes:
                place = (node, sizes.index(symbols.rows), sizes.index(symbol))
                spaces[symbol] = Space(len(spaces), symbol, node.meta["input"].name, place)
                break
        else:
            raise Declined(f"no input has both rows and the positions {symbol}")
    return spaces
