"""Recognition of gradients that are sparse rows of an embedding, alone or added to a dense gradient.

The sum occurs where the embedding shares its weight with the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class EmbeddingRows:
    """A gradient that is `rest` plus `values` at the rows `ids`.

    Attributes:
        rest: the dense part; None for zeros.
        ids: [...], the rows.
        values: [..., width], one for each id.
        kept: which of the ids count; None for all.
        padding: an id that does not count; None for none.
    """

    rest: fx.Node | None
    ids: fx.Node
    values: fx.Node
    kept: fx.Node | None = None
    padding: int | None = None


def embedding_rows(gradient: fx.Node) -> EmbeddingRows | None:
    """Return the parts of `gradient`, an output of a backward graph, or None if it is no gradient of embedding rows."""
    found = _rows(gradient)
    if found is not None or gradient.target is not aten.add.Tensor or len(gradient.users) != 1 or gradient.kwargs:
        return found
    one, other = gradient.args
    for rows, rest in ((one, other), (other, one)):
        if not isinstance(rows, fx.Node) or not isinstance(rest, fx.Node):
            continue
        found = _rows(rows)
        if found is not None and _alike(rest, gradient):
            return replace(found, rest=rest)
    return None


def _rows(node: fx.Node) -> EmbeddingRows | None:
    read = _READERS.get(node.target)
    found = read(node) if read is not None and len(node.users) == 1 else None
    if found is None:
        return None
    ids, values, table = (each.meta["val"] for each in (found.ids, found.values, node))
    if ids.dtype not in (torch.int64, torch.int32) or values.dtype != table.dtype or table.dim() != 2:
        return None
    wanted = (*ids.shape, table.shape[1])
    return found if len(values.shape) == len(wanted) and all(map(_same, values.shape, wanted)) else None


def _embedding_backward(node: fx.Node) -> EmbeddingRows | None:
    values, ids, _, padding, by_frequency = node.args
    if by_frequency or not (isinstance(values, fx.Node) and isinstance(ids, fx.Node) and isinstance(padding, int)):
        return None
    return EmbeddingRows(None, ids, values, padding=padding if padding >= 0 else None)


def _masked_put(node: fx.Node) -> EmbeddingRows | None:
    table, kept, ids, values = node.args
    found = _put_into_zeros(table, ids, values)
    return replace(found, kept=kept) if found is not None and isinstance(kept, fx.Node) else None


def _put(node: fx.Node) -> EmbeddingRows | None:
    table, ids, values, *accumulate = node.args
    return _put_into_zeros(table, ids, values) if accumulate == [True] else None


def _put_into_zeros(table: Any, ids: Any, values: Any) -> EmbeddingRows | None:
    if not _is_zeros(table) or not isinstance(ids, (list, tuple)) or len(ids) != 1:
        return None
    [where] = ids
    return EmbeddingRows(None, where, values) if isinstance(where, fx.Node) and isinstance(values, fx.Node) else None


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.dtype == b.dtype and a.shape == b.shape)


def _same(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal, without adding a guard."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return bool(one.node.expr == other.node.expr)


_READERS: dict[Any, Callable[[fx.Node], EmbeddingRows | None]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._unsafe_masked_index_put_accumulate.default: _masked_put,
    aten.index_put.default: _put,
}
