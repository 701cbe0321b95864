"""Every operator rule against eager: equal at tokens, and no token follows from another one.

`PACKS` holds calls that a rule has to pack, `DECLINES` calls of the same operators that it has to leave alone, because
their arguments make them look across rows or positions. A rule without cases fails `test_every_rule_has_cases`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.graphs import is_random
from deepytorch.passes.unpad.demand import admitted_rule
from deepytorch.passes.unpad.layout import VIEWS
from deepytorch.passes.unpad.region import Declined
from deepytorch.passes.unpad.rules import _UNREDUCED_LOSSES, RULES, Pointwise, rule_for
from tests.passes.padded_graph import Packed, PaddedGraph, assert_tokens_as_eager, batches

aten = torch.ops.aten
Write = Callable[[PaddedGraph], fx.Node]
Cases = dict[Any, dict[str, Write]]

END = torch.iinfo(torch.int64).max  # where an open slice ends

# ------------------------------------------------------------------------------------------------ cases


def call(target: Any, *dims: Any, args: tuple[Any, ...] = (), **kwargs: Any) -> Write:
    """`target(x, *args)` of a value with these dimensions."""
    return lambda g: g.call(target, g.x(*dims), *args, **kwargs)


def both_shapes(target: Any, *args: Any, **kwargs: Any) -> dict[str, Write]:
    """An operator of one tensor, on three layouts."""
    return {
        "tokens first": call(target, "r", "p", 4, args=args, **kwargs),
        "heads between": call(target, "r", 3, "p", 4, args=args, **kwargs),
        "merged": lambda g: g.call(target, g.merged(g.x("r", "p", 4)), *args, **kwargs),
    }


ELEMENTWISE: dict[Any, tuple[Any, ...]] = {
    aten.to.dtype: (torch.float32,), aten.to.device: ("cpu", torch.float32), aten._to_copy.default: (),
    aten.contiguous.default: (), aten.clone.default: (), aten.alias.default: (), aten.detach.default: (),
    aten.gelu.default: (), aten.silu.default: (), aten.relu.default: (), aten.leaky_relu.default: (0.1,),
    aten.elu.default: (), aten.mish.default: (), aten.softplus.default: (), aten.hardswish.default: (),
    aten.relu6.default: (), aten.selu.default: (), aten.celu.default: (), aten.tanh.default: (),
    aten.sigmoid.default: (), aten.log_sigmoid.default: (), aten.square.default: (), aten.clamp.default: (-0.5, 0.5),
    aten.nan_to_num.default: (0.0,), aten.zeros_like.default: (), aten.ones_like.default: (),
    aten.full_like.default: (3.0,), aten.dropout.default: (0.5, False), aten.masked_fill.Scalar: (),
}  # fmt: skip


def visible(g: PaddedGraph) -> fx.Node:
    """The token mask as (rows, positions, 1) bool."""
    return g.call(aten.unsqueeze.default, g.call(aten.ne.Scalar, g.mask, 0), -1)


def times(*dims: Any, own: tuple[Any, ...] = ("r", "p", 4), own_first: bool = True) -> Write:
    """A product with an operand that broadcasts."""

    def write(g: PaddedGraph) -> fx.Node:
        x, other = g.x(*own), g.x(*dims)
        return g.call(aten.mul.Tensor, *((x, other) if own_first else (other, x)))

    return write


def cut(g: PaddedGraph, x: fx.Node, start: int, end: int = END, dim: int = 1) -> fx.Node:
    return g.call(aten.slice.Tensor, x, dim, start, end)


def scattered(target: Any, dim: int, columns: int, value: float | None = None) -> Write:
    """Writes into one dimension of (rows, positions, 3), at indices of the model's own."""

    def write(g: PaddedGraph) -> fx.Node:
        x, index = g.x("r", "p", 3), g.x("r", "p", columns, dtype=torch.int64)
        return g.call(target, x, dim, index, g.x("r", "p", columns) if value is None else value)

    return write


def shifted(start: int, end: int, other_start: int, other_end: int, other: str) -> Write:
    """x[:, start:end] * other[other_start:other_end], of the model's tokens, its positions, or the batch."""

    def write(g: PaddedGraph) -> fx.Node:
        x = cut(g, g.x("r", "p", 4), start, end)
        if other == "tokens":
            return g.call(aten.mul.Tensor, x, cut(g, g.x("r", "p", 4), other_start, other_end))
        if other == "positions":
            return g.call(aten.mul.Tensor, x, cut(g, g.x("p", 4), other_start, other_end, dim=0))
        labels = cut(g, g.batch("r", "p"), other_start, other_end)
        return g.call(aten.mul.Tensor, x, g.call(aten.unsqueeze.default, labels, -1))

    return write


# Broadcasting, on one operator of those that torch calls pointwise: all of them have this rule.
BROADCASTS = {
    "per position": times("p", 4),
    "per position, one row": times(1, "p", 4),
    "per row": times("r", 1, 4),
    "per row, one number": times("r", 1, 1),
    "a vector": times(4),
    "a number": times(),
    "one number a token": times("r", "p", 1),
    "heads": times("r", 1, "p", 4, own=("r", 3, "p", 4)),
    "a head": times(3, 1, 1, own=("r", 3, "p", 4)),
    "per position, heads": times("p", 1, own=("r", 3, "p", 4)),
    "per row, heads": times("r", 3, 1, 1, own=("r", 3, "p", 4)),
    "per position, before heads": times("p", 1, 4, own=("r", "p", 3, 4)),
    "positions first": times("p", 1, 4, own=("p", "r", 4)),
    "rows last": times("r", own=("p", 4, "r")),
    "given first": times("p", 4, own_first=False),
    "rows and positions that meet": lambda g: g.call(aten.mul.Tensor, times("p", 1)(g), g.x("r", 1, 4)),
    "both cut alike": shifted(1, END, 1, END, "tokens"),
    "cut, per position": shifted(1, END, 1, END, "positions"),
    "cut, ends per position": shifted(0, -1, 0, -1, "positions"),
    "middle": shifted(1, -1, 1, -1, "positions"),
    "labels shifted": shifted(0, -1, 1, END, "batch"),
    "labels cut alike": shifted(1, END, 1, END, "batch"),
    "labels in the middle": shifted(1, -1, 2, END, "batch"),
}
NO_BROADCASTS = {
    "neighbours": shifted(1, END, 0, -1, "tokens"),
    "neighbours, the other way": shifted(0, -1, 1, END, "tokens"),
    "a later position's row": shifted(0, -1, 1, END, "positions"),
    "an earlier one": shifted(1, END, 0, -1, "positions"),
    "next but one": shifted(2, END, 0, -2, "tokens"),
    "cut elsewhere": shifted(1, -1, 2, END, "tokens"),
    "every position of a row": times("r", 1, "p", own=("r", "p", 1)),
    "every row of a position": times(1, "r", 1, own=("r", "p", 1, 1)),
    "merged with numbers": lambda g: g.call(
        aten.mul.Tensor,
        view("r", ("p", 4))(g),
        g.call(aten.view.default, g.x("p", 4), [g.call(operator.mul, g.size("p"), 4)]),
    ),
}


# Operators along a dimension, with what they take besides the dimension: (before it, after it).
ALONG: dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    aten.max.dim: ((), ()),
    aten.min.dim: ((), ()),
    aten.argmax.default: ((), ()),
    aten.argmin.default: ((), (True,)),
    aten.any.dim: ((), ()),
    aten.all.dim: ((), (True,)),
    aten.softmax.int: ((), ()),
    aten._softmax.default: ((), (False,)),
    aten.log_softmax.int: ((), ()),
    aten._log_softmax.default: ((), (False,)),
    aten.cumsum.default: ((), ()),
    aten.glu.default: ((), ()),
    aten.topk.default: ((2,), ()),
    aten.sort.default: ((), ()),
    aten.select.int: ((), (1,)),
    aten.split.Tensor: ((2,), ()),
    aten.split.sizes: (([1, 3],), ()),
    aten.split_with_sizes.default: (([3, 1],), ()),
    aten.chunk.default: ((2,), ()),
    aten.unbind.int: ((), ()),
    aten.narrow.default: ((), (1, 2)),
}
# The same with a list of dimensions.
ALONG_SOME: dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    aten.mean.dim: ((), ()), aten.sum.dim_IntList: ((), (True,)), aten.var.dim: ((), (False,)),
    aten.var.correction: ((), ()), aten.std.dim: ((), (False, True)), aten.std.correction: ((), ()),
    aten.amax.default: ((), ()), aten.amin.default: ((), (True,)), aten.logsumexp.default: ((), ()),
    aten.linalg_vector_norm.default: ((2,), ()), aten.norm.ScalarOpt_dim: ((2,), ()), aten.flip.default: ((), ()),
    aten.roll.default: (([1],), ()),
}  # fmt: skip
# Without dimensions these look at every number.
WITHOUT_DIMS: dict[Any, tuple[Any, ...]] = {
    aten.argmax.default: (None,), aten.argmin.default: (None,), aten.mean.dim: (None,), aten.sum.dim_IntList: ([],),
    aten.var.dim: (None,), aten.var.correction: (None,), aten.std.dim: (None,), aten.std.correction: (None,),
    aten.amax.default: ([],), aten.amin.default: ([],), aten.linalg_vector_norm.default: (2, None),
    aten.norm.ScalarOpt_dim: (2, []), aten.roll.default: ([1],),
}  # fmt: skip


def along(target: Any, dims: tuple[Any, ...], dim: Any) -> Write:
    before, after = {**ALONG, **ALONG_SOME}[target]
    if target is aten.roll.default:
        before = ([1] * len(dim),)
    return call(target, *dims, args=(*before, dim, *after))


def view(*sizes: Any, target: Any = aten.view.default, of: tuple[Any, ...] = ("r", "p", 4)) -> Write:
    """A view; a size that is a tuple is a product."""

    def write(g: PaddedGraph, x: fx.Node | None = None) -> fx.Node:
        x = g.x(*of) if x is None else x
        wanted = []
        for size in sizes:
            total: Any = 1
            for factor in size if isinstance(size, tuple) else (size,):
                factor = g.size(factor) if isinstance(factor, str) else factor
                total = factor if total == 1 else g.call(operator.mul, total, factor)
            wanted.append(total)
        return g.call(target, x, wanted)

    return write


def then(first: Write, second: Callable[[PaddedGraph, fx.Node], fx.Node]) -> Write:
    return lambda g: second(g, first(g))


def turned(*order: int, of: tuple[Any, ...] = ("r", "p", 4)) -> Write:
    return call(aten.permute.default, *of, args=(list(order),))


def linear(*dims: Any, bias: bool = True) -> Write:
    def write(g: PaddedGraph) -> fx.Node:
        return g.call(aten.linear.default, g.x(*dims), g.weight(3, dims[-1]), *([g.weight(3)] if bias else []))

    return write


def addmm(*bias: Any, **kwargs: Any) -> Write:
    return lambda g: g.call(aten.addmm.default, g.x(*bias), g.merged(g.x("r", "p", 4)), g.weight(4, 3), **kwargs)


def norm(target: Any, dims: tuple[Any, ...], over: list[int], weights: int) -> Write:
    return lambda g: g.call(target, g.x(*dims), over, *(g.weight(*over) for _ in range(weights)))


def gather(dims: tuple[Any, ...], index: tuple[Any, ...], dim: int, role: Role = Role.PARAMETER) -> Write:
    return lambda g: g.call(aten.gather.default, g.x(*dims), dim, g.input(*index, role=role, dtype=torch.int64))


def cut_gather(start: int, end: int, index_start: int, index_end: int, role: Role) -> Write:
    def write(g: PaddedGraph) -> fx.Node:
        index = g.input("r", "p", 1, role=role, dtype=torch.int64)
        x = cut(g, g.x("r", "p", 4), start, end)
        return g.call(aten.gather.default, x, 2, cut(g, index, index_start, index_end))

    return write


def cat(target: Any, dim: int, *parts: tuple[Any, ...]) -> Write:
    return lambda g: g.call(target, [g.x(*part) for part in parts], dim)


def embedding(*table: int, args: tuple[Any, ...] = (), ids: tuple[Any, ...] = ("r", "p")) -> Write:
    return lambda g: g.call(aten.embedding.default, g.weight(*table), g.batch(*ids), *args)


def item(g: PaddedGraph, several: fx.Node, index: int = 0) -> fx.Node:
    return g.call(operator.getitem, several, index)


def loss(target: Any, reduction: int) -> Write:
    def write(g: PaddedGraph) -> fx.Node:
        x, y = g.x("r", "p", 4), g.x("r", "p", 4)
        if target is aten.binary_cross_entropy.default:  # takes 0 to 1, and no NaN
            x, y = (g.call(aten.sigmoid.default, g.call(aten.nan_to_num.default, each)) for each in (x, y))
        before = (None, None) if "logits" in str(target) else (None,) if "cross_entropy" in str(target) else ()
        return g.call(target, x, y, *before, reduction)

    return write


PACKS: Cases = {
    **{target: both_shapes(target, *args) for target, args in ELEMENTWISE.items()},
    aten.to.dtype_layout: both_shapes(aten.to.dtype_layout, dtype=torch.float32),
    aten.type_as.default: {
        "a token": lambda g: g.call(aten.type_as.default, g.x("r", "p", 4), g.x("r", "p", 4)),
        "a weight": lambda g: g.call(aten.type_as.default, g.x("r", "p", 4), g.weight(1)),
    },
    aten.where.self: {
        "by token": lambda g: g.call(aten.where.self, visible(g), g.x("r", "p", 4), g.x("r", "p", 4)),
        "by position": lambda g: g.call(aten.where.self, visible(g), g.x("r", "p", 4), g.x("p", 4)),
        "broadcast": lambda g: g.call(aten.where.self, visible(g), g.x(4), g.x("r", 1, 4)),
    },
    aten.where.ScalarOther: {"": lambda g: g.call(aten.where.ScalarOther, visible(g), g.x("r", "p", 4), 2.0)},
    aten.where.ScalarSelf: {"": lambda g: g.call(aten.where.ScalarSelf, visible(g), 2.0, g.x("r", "p", 4))},
    aten.masked_fill.Scalar: {
        "": lambda g: g.call(aten.masked_fill.Scalar, g.x("r", "p", 4), visible(g), 2.0),
        "by position": lambda g: g.call(
            aten.masked_fill.Scalar, g.x("r", "p", 4), g.input("p", 1, dtype=torch.bool), 2.0
        ),
    },
    aten.masked_fill.Tensor: {
        "": lambda g: g.call(aten.masked_fill.Tensor, g.x("r", "p", 4), visible(g), g.input(role=Role.PARAMETER))
    },
    aten.mul.Tensor: BROADCASTS,
    aten.linear.default: {
        "3-D": linear("r", "p", 4),
        "no bias": linear("r", "p", 4, bias=False),
        "heads": linear("r", 3, "p", 4),
        "positions first": linear("p", "r", 4),
        "merged": lambda g: g.call(aten.linear.default, g.merged(g.x("r", "p", 4)), g.weight(3, 4)),
    },
    aten.addmm.default: {"vector": addmm(3), "one": addmm(1), "scaled": addmm(3, beta=2, alpha=0.5)},
    aten.mm.default: {"": lambda g: g.call(aten.mm.default, g.merged(g.x("r", "p", 4)), g.weight(4, 3))},
    aten.matmul.default: {
        "weight": lambda g: g.call(aten.matmul.default, g.x("r", "p", 4), g.weight(4, 3)),
        "a token's own": lambda g: g.call(aten.matmul.default, g.x("r", "p", 2, 4), g.x("r", "p", 4, 3)),
        "a token's own, heads": lambda g: g.call(aten.matmul.default, g.x("r", 2, "p", 5, 4), g.x("r", 2, "p", 4, 3)),
    },
    aten.layer_norm.default: {
        "": norm(aten.layer_norm.default, ("r", "p", 4), [4], 2),
        "bare": norm(aten.layer_norm.default, ("r", 3, "p", 4), [4], 0),
        "over two": norm(aten.layer_norm.default, ("r", "p", 3, 4), [3, 4], 2),
    },
    aten.rms_norm.default: {
        "": norm(aten.rms_norm.default, ("r", "p", 4), [4], 1),
        "bare": norm(aten.rms_norm.default, ("p", "r", 4), [4], 0),
        "over two": norm(aten.rms_norm.default, ("r", "p", 3, 4), [3, 4], 1),
    },
    **{
        target: {
            "last": along(target, ("r", "p", 4), -1),
            "heads": along(target, ("r", 4, "p", 6), 1),
            "last of heads": along(target, ("r", 6, "p", 4), 3),
            "rows last": along(target, ("p", 4, "r"), 1),
        }
        for target in ALONG
    },
    aten.select.int: {
        "last": along(aten.select.int, ("r", "p", 4), -1),
        "heads": along(aten.select.int, ("r", 4, "p", 6), 1),
        "at a size": lambda g: g.call(aten.select.int, g.x("r", "p", 40), 2, g.size("r")),
    },
    **{
        target: {
            "last": along(target, ("r", "p", 4), [-1]),
            "heads": along(target, ("r", 4, "p", 6), [1]),
            "several": along(target, ("r", 6, "p", 4), [1, -1]),
            "one after another": along(target, ("r", "p", 6, 4), [2, 3]),
        }
        for target in ALONG_SOME
    },
    aten.gather.default: {
        "": gather(("r", "p", 4), ("r", "p", 2), 2),
        "heads": gather(("r", 3, "p", 4), ("r", 3, "p", 2), -1),
        "fewer heads": gather(("r", 3, "p", 4), ("r", 2, "p", 1), 3),
        "of the batch": gather(("r", "p", 4), ("r", "p", 1), 2, Role.BATCH),
        "of heads": gather(("r", 3, "p", 4), ("r", 2, "p", 4), 1),
        "both cut": cut_gather(1, END, 1, END, Role.PARAMETER),
        "labels shifted": cut_gather(0, -1, 1, END, Role.BATCH),
    },
    aten.slice.Tensor: {
        "plain": call(aten.slice.Tensor, "r", "p", 4, args=(2, 1, 3)),
        "plain, step": call(aten.slice.Tensor, "r", 4, "p", args=(1, 0, 4, 2)),
        "plain, from the end": call(aten.slice.Tensor, "r", "p", 4, args=(-1, -3, -1)),
        "whole": call(aten.slice.Tensor, "r", "p", 4, args=(1, 0, END)),
        "all rows": call(aten.slice.Tensor, "r", "p", 4),
        "but the first": call(aten.slice.Tensor, "r", "p", 4, args=(1, 1, END)),
        "but the last": call(aten.slice.Tensor, "r", "p", 4, args=(1, 0, -1)),
        "middle": call(aten.slice.Tensor, "r", 3, "p", 4, args=(2, 1, -1)),
        "twice": then(call(aten.slice.Tensor, "r", "p", 4, args=(1, 1, END)), lambda g, x: cut(g, x, 1)),
        "from both sides": then(call(aten.slice.Tensor, "r", "p", 4, args=(1, 1, END)), lambda g, x: cut(g, x, 0, -1)),
    },
    aten.cat.default: {
        "last": cat(aten.cat.default, -1, ("r", "p", 4), ("r", "p", 2)),
        "heads": cat(aten.cat.default, 1, ("r", 3, "p", 4), ("r", 1, "p", 4)),
        "positions first": cat(aten.cat.default, 2, ("p", "r", 4), ("p", "r", 4)),
    },
    aten.stack.default: {
        "last": cat(aten.stack.default, -1, ("r", "p", 4), ("r", "p", 4)),
        "heads": cat(aten.stack.default, 1, ("r", "p", 4), ("r", "p", 4)),
        "first": cat(aten.stack.default, 0, ("r", "p"), ("r", "p")),
    },
    aten.unsqueeze.default: {
        "last": call(aten.unsqueeze.default, "r", "p", 4, args=(-1,)),
        "first": call(aten.unsqueeze.default, "r", "p", args=(0,)),
        "between": call(aten.unsqueeze.default, "r", "p", 4, args=(1,)),
    },
    aten.squeeze.dim: {
        "": call(aten.squeeze.dim, "r", 1, "p", 4, args=(1,)),
        "nothing": call(aten.squeeze.dim, "r", "p", 4, args=(2,)),
        "last": call(aten.squeeze.dim, "r", "p", 1, args=(-1,)),
    },
    aten.squeeze.dims: {"": call(aten.squeeze.dims, "r", 1, "p", 4, 1, args=([1, -1],))},
    aten.squeeze.default: {"": call(aten.squeeze.default, 1, "r", 1, "p", 4)},
    aten.permute.default: {
        "heads": turned(0, 2, 1, 3, of=("r", "p", 3, 4)),
        "rows and positions": turned(1, 0, 2),
        "last first": turned(2, 0, 1),
        "plain": turned(0, 1, 3, 2, of=("r", "p", 3, 4)),
        "negative": turned(0, -1, 1),
    },
    aten.transpose.int: {
        "heads": call(aten.transpose.int, "r", "p", 3, 4, args=(1, 2)),
        "plain": call(aten.transpose.int, "r", 3, "p", 4, args=(-1, 1)),
        "rows and positions": call(aten.transpose.int, "r", "p", 4, args=(0, 1)),
    },
    aten.t.default: {
        "": lambda g: g.call(aten.t.default, g.merged(g.x("r", "p", 4))),
        "of rows": call(aten.t.default, "r", "p"),
    },
    aten.mT.default: {"plain": call(aten.mT.default, "r", "p", 3, 4), "positions": call(aten.mT.default, "r", "p", 4)},
    aten.expand.default: {
        "a token": lambda g: g.call(aten.expand.default, g.x("r", "p", 1), [-1, -1, 4]),
        "heads": lambda g: g.call(aten.expand.default, g.x("r", 1, "p", 4), [-1, 3, -1, -1]),
        "positions to rows": lambda g: g.call(aten.expand.default, g.x("p", 4), [g.size("r"), -1, -1]),
        "rows to positions": lambda g: g.call(aten.expand.default, g.x("r", 1, 4), [-1, g.size("p"), 4]),
        "a vector": lambda g: g.call(aten.expand.default, g.weight(4), [g.size("r"), g.size("p"), 4]),
    },
    aten.embedding.default: {
        "": embedding(5, 4),
        "a padding index": embedding(5, 4, args=(1,)),
        "heads": embedding(5, 4, ids=("r", 3, "p")),
    },
    aten.index.Tensor: {
        "weights by number": lambda g: g.call(aten.index.Tensor, g.weight(3, 4), [g.x("r", "p", dtype=torch.int64)]),
        "features by constants": lambda g: g.call(
            aten.index.Tensor, g.x("r", "p", 5, 4), [None, None, g.buffer(torch.tensor([3, 1]))]
        ),
        "heads by constants": lambda g: g.call(
            aten.index.Tensor, g.x("r", 3, "p", 4), [None, g.buffer(torch.tensor([[-1, 0]]))]
        ),
        "matrices by numbers": lambda g: g.call(
            aten.index.Tensor, g.weight(3, 4, 2), [g.x("r", 2, "p", dtype=torch.int64)]
        ),
    },
    **{
        target: {
            "another's shape": lambda g, target=target: g.call(target, g.x("r", "p", 6), g.x("r", "p", 2, 3)),
            "merged": lambda g, target=target: g.call(target, g.x("r", "p", 4), g.merged(g.x("r", "p", 4))),
        }
        for target in (aten.reshape_as.default, aten.view_as.default)
    },
    aten.repeat.default: {
        "features": call(aten.repeat.default, "r", "p", 4, args=([1, 1, 3],)),
        "heads": call(aten.repeat.default, "r", 3, "p", 4, args=([1, 2, 1, 1],)),
    },
    aten.expand_as.default: {
        "a weight": lambda g: g.call(aten.expand_as.default, g.weight(4), g.x("r", "p", 4)),
        "a number a token": lambda g: g.call(aten.expand_as.default, g.x("r", "p", 1), g.x("r", "p", 4)),
    },
    aten.repeat_interleave.self_int: {
        "tokens": lambda g: g.call(aten.repeat_interleave.self_int, g.merged(g.x("r", "p", 4)), 2, 0),
        "entries of tokens": then(
            lambda g: g.call(aten.repeat_interleave.self_int, g.merged(g.x("r", "p", 4)), 2, 0),
            lambda g, x: g.call(aten.repeat_interleave.self_int, x, 3, 0),
        ),
        "heads": call(aten.repeat_interleave.self_int, "r", 3, "p", 4, args=(2, 1)),
        "rows": call(aten.repeat_interleave.self_int, "r", "p", 4, args=(2, 0)),
        "positions": call(aten.repeat_interleave.self_int, "r", "p", 4, args=(2, 1)),
    },
    aten.view_as_complex.default: {"pairs": call(aten.view_as_complex.default, "r", 3, "p", 4, 2)},
    aten.view_as_real.default: {
        "numbers": then(
            call(aten.view_as_complex.default, "r", "p", 4, 2), lambda g, x: g.call(aten.view_as_real.default, x)
        )
    },
    aten.bmm.default: {
        "a matrix a token": lambda g: g.call(
            aten.bmm.default, g.merged(g.x("r", "p", 2, 4)), g.merged(g.x("r", "p", 4, 3))
        )
    },
    aten.scatter.value: {"a column a token": scattered(aten.scatter.value, 2, 1, value=1.5)},
    aten.scatter.src: {"a column a token": scattered(aten.scatter.src, 2, 1)},
    aten.scatter_add.default: {"a column a token": scattered(aten.scatter_add.default, 2, 1)},
    operator.getitem: {
        "sorted": then(call(aten.sort.default, "r", "p", 4), lambda g, x: item(g, x, 1)),
        "a part": then(call(aten.chunk.default, "r", 4, "p", args=(2, 1)), lambda g, x: item(g, x, 1)),
        "one of many": then(call(aten.unbind.int, "r", 4, "p", args=(1,)), lambda g, x: item(g, x, 3)),
    },
    **{target: {"none": loss(target, 0)} for target in sorted(_UNREDUCED_LOSSES, key=str)},
    aten.view.default: {
        "merge": view(("r", "p"), 4),
        "heads": view("r", "p", 3, 2, of=("r", "p", 6)),
        "heads merge": view("r", "p", 6, of=("r", "p", 3, 2)),
        "numbers into positions": view("r", ("p", 4)),
        "positions first": view(("p", "r"), 4, of=("p", "r", 4)),
        "one line": view((("r"), "p", 4)),
        "split merged": then(view(("r", "p"), 4), lambda g, x: view("r", "p", 2, 2)(g, x)),
        "split numbers off": then(view("r", ("p", 4)), lambda g, x: view("r", "p", 4)(g, x)),
        "ones": view("r", 1, "p", 4),
        "a head's rows": view(("r", 3), "p", 4, of=("r", 3, "p", 4)),
    },
    aten.reshape.default: {
        "merge": view(("r", "p"), 4, target=aten.reshape.default),
        "merge what was turned": then(
            turned(1, 0, 2), lambda g, x: view(("p", "r"), 4, target=aten.reshape.default)(g, x)
        ),
        "heads": then(
            turned(0, 2, 1, 3, of=("r", 3, "p", 4)), lambda g, x: view("r", "p", 12, target=aten.reshape.default)(g, x)
        ),
    },
    aten._unsafe_view.default: {"merge": view(("r", "p"), 4, target=aten._unsafe_view.default)},
    aten.flatten.using_ints: {
        "merge": call(aten.flatten.using_ints, "r", "p", 4, args=(0, 1)),
        "heads": call(aten.flatten.using_ints, "r", "p", 3, 4, args=(2, 3)),
    },
    aten.unflatten.int: {
        "heads": call(aten.unflatten.int, "r", "p", 6, args=(2, [3, 2])),
        "last": call(aten.unflatten.int, "r", 6, "p", args=(1, [2, -1])),
    },
}

DECLINES: Cases = {
    aten.mul.Tensor: NO_BROADCASTS,
    aten.clone.default: {"channels last": call(aten.clone.default, "r", "p", 3, 4, memory_format=torch.channels_last)},
    aten.where.self: {
        "a neighbour's mask": lambda g: g.call(
            aten.where.self,
            g.call(aten.gt.Scalar, cut(g, g.x("r", "p", 1), 0, -1), 0),
            cut(g, g.x("r", "p", 4), 1),
            g.x(4),
        ),
        "a neighbour": lambda g: g.call(
            aten.where.self, cut(g, visible(g), 1), cut(g, g.x("r", "p", 4), 1), cut(g, g.x("r", "p", 4), 0, -1)
        ),
    },
    aten.masked_fill.Scalar: {
        "a neighbour's mask": lambda g: g.call(
            aten.masked_fill.Scalar,
            cut(g, g.x("r", "p", 4), 1),
            g.call(aten.gt.Scalar, cut(g, g.x("r", "p", 1), 0, -1), 0),
            0.0,
        )
    },
    aten.linear.default: {"along positions": linear("r", 4, "p")},
    aten.addmm.default: {
        "a bias a token": lambda g: g.call(
            aten.addmm.default, g.merged(g.x("r", "p", 3)), g.merged(g.x("r", "p", 4)), g.weight(4, 3)
        )
    },
    aten.mm.default: {
        "along tokens": lambda g: g.call(
            aten.mm.default, g.call(aten.t.default, g.merged(g.x("r", "p", 4))), g.merged(g.x("r", "p", 4))
        ),
        "a weight first": lambda g: g.call(
            aten.mm.default, g.weight(3, 4), g.call(aten.t.default, g.merged(g.x("r", "p", 4)))
        ),
        "rows of heads": lambda g: g.call(
            aten.mm.default, view(("r", "p", 3), 4, of=("r", "p", 3, 4))(g), g.weight(4, 3)
        ),
    },
    aten.matmul.default: {
        "a weight first": lambda g: g.call(aten.matmul.default, g.weight(3, 4), g.x("r", 4, "p")),
        "a vector": lambda g: g.call(aten.matmul.default, g.x("r", "p", 4), g.weight(4)),
        "a matrix a row": lambda g: g.call(aten.matmul.default, g.x("r", "p", 4), g.x("r", 4, 3)),
        "a matrix a row, heads": lambda g: g.call(aten.matmul.default, g.x("r", 3, "p", 4), g.x("r", 3, 4, 2)),
        "scores": lambda g: g.call(aten.matmul.default, g.x("r", "p", 4), g.call(aten.mT.default, g.x("r", "p", 4))),
        "a neighbour's": lambda g: g.call(
            aten.matmul.default, cut(g, g.x("r", "p", 2, 4), 1), cut(g, g.x("r", "p", 4, 3), 0, -1)
        ),
        "a matrix of positions": lambda g: g.call(aten.matmul.default, g.x("r", "p", 4), g.x(4, "p")),
    },
    aten.layer_norm.default: {
        "a weight a position": lambda g: g.call(aten.layer_norm.default, g.x("r", "p", 4), [g.size("p"), 4])
    },
    aten.rms_norm.default: {
        "over positions": lambda g: g.call(aten.rms_norm.default, g.x("r", "p", 4), [g.size("p"), 4])
    },
    **{
        target: {"positions": along(target, ("r", 4, "p", 6), 2), "rows": along(target, ("p", "r", 4), 1)}
        for target in ALONG
        if target not in (aten.glu.default, aten.split.sizes, aten.split_with_sizes.default)
    },
    aten.glu.default: {
        "positions": lambda g: g.call(aten.glu.default, view("r", ("p", 4))(g), 1),
        "rows": lambda g: g.call(aten.glu.default, view(("r", 4), "p", of=("r", 4, "p"))(g), 0),
    },
    **{
        target: {
            "positions": lambda g, target=target: g.call(
                target, g.x("r", "p", 4), [2, g.call(operator.sub, g.size("p"), 2)], 1
            )
        }
        for target in (aten.split.sizes, aten.split_with_sizes.default)
    },
    **{
        target: {
            "positions": along(target, ("r", 4, "p", 6), [2]),
            "positions too": along(target, ("r", "p", 4), [-1, -2]),
            "rows": along(target, ("r", "p", 4), [0]),
        }
        for target in ALONG_SOME
    },
    aten.gather.default: {
        "positions": gather(("r", "p", 4), ("r", "p", 4), 1),
        "rows": gather(("r", "p", 4), ("r", "p", 4), 0),
        "a neighbour's index": cut_gather(1, END, 0, -1, Role.PARAMETER),
        "an index a row": gather(("r", "p", 4), ("r", 1, 4), 2),
        "an index along other positions": gather(("r", "p", 40), ("r", 2, "p"), 2),
    },
    aten.slice.Tensor: {
        "the last ones": call(aten.slice.Tensor, "r", "p", 4, args=(1, -3, END)),
        "the first ones": call(aten.slice.Tensor, "r", "p", 4, args=(1, 0, 3)),
        "every other": call(aten.slice.Tensor, "r", "p", 4, args=(1, 0, END, 2)),
        "rows": call(aten.slice.Tensor, "r", "p", 4, args=(0, 1, END)),
        "a start that is a size": lambda g: g.call(
            aten.slice.Tensor, g.x("r", "p", 4), 1, g.call(operator.sub, g.size("r"), 2), END
        ),
        "merged": lambda g: cut(g, g.merged(g.x("r", "p", 4)), 1, END, dim=0),
    },
    aten.cat.default: {
        "positions": cat(aten.cat.default, 1, ("r", "p", 4), ("r", "p", 4)),
        "rows": cat(aten.cat.default, 0, ("r", "p", 4), ("r", "p", 4)),
        "one more position": cat(aten.cat.default, 1, ("r", "p", 4), ("r", 1, 4)),
        "neighbours": lambda g: g.call(
            aten.cat.default, [cut(g, g.x("r", "p", 4), 1), cut(g, g.x("r", "p", 4), 0, -1)], -1
        ),
    },
    aten.stack.default: {
        "neighbours": lambda g: g.call(
            aten.stack.default, [cut(g, g.x("r", "p", 4), 1), cut(g, g.x("r", "p", 4), 0, -1)], 2
        )
    },
    aten.expand.default: {
        "one row's": lambda g: g.call(aten.expand.default, view(1, ("p", 4), of=("p", 4))(g), [g.size("r"), -1])
    },
    aten.embedding.default: {
        "counts ids": embedding(5, 4, args=(-1, True)),
        "a table of the batch's": lambda g: g.call(aten.embedding.default, g.x("p", 4), g.batch("r", "p")),
    },
    aten.index.Tensor: {
        "tokens by number": lambda g: g.call(aten.index.Tensor, g.x("r", "p", 4), [g.x("r", "p", dtype=torch.int64)]),
        "weights by a truth": lambda g: g.call(aten.index.Tensor, g.weight(3, 4), [g.x(3, dtype=torch.bool)]),
        "positions by constants": lambda g: g.call(
            aten.index.Tensor, g.x("r", "p", 4), [None, g.buffer(torch.tensor([1, 0]))]
        ),
        "columns": lambda g: g.call(aten.index.Tensor, g.weight(3, 4), [None, g.x("r", "p", dtype=torch.int64)]),
        "two numbers": lambda g: g.call(aten.index.Tensor, g.weight(3, 4), [g.x("r", "p", dtype=torch.int64)] * 2),
    },
    **{
        target: {
            "rows and positions change places": lambda g, target=target: g.call(
                target, g.x("r", "p", 4), g.x("p", "r", 4)
            )
        }
        for target in (aten.reshape_as.default, aten.view_as.default)
    },
    aten.repeat.default: {
        "rows": call(aten.repeat.default, "r", "p", 4, args=([2, 1, 1],)),
        "positions": call(aten.repeat.default, "r", "p", 4, args=([1, 2, 1],)),
        "a new dimension": call(aten.repeat.default, "r", "p", 4, args=([2, 1, 1, 1],)),
    },
    aten.expand_as.default: {
        "positions of a row": lambda g: g.call(aten.expand_as.default, g.x("p", 4), g.x("p", "p", 4)),
    },
    aten.repeat_interleave.self_int: {
        "all numbers": call(aten.repeat_interleave.self_int, "r", "p", 4, args=(2,)),
        "rows alone": call(aten.repeat_interleave.self_int, "r", 4, args=(2, 0)),
    },
    aten.view_as_complex.default: {"pairs of positions": call(aten.view_as_complex.default, "r", 4, 2)},
    aten.view_as_real.default: {
        "no tokens": then(
            call(aten.view_as_complex.default, "r", 4, 2), lambda g, x: g.call(aten.view_as_real.default, x)
        )
    },
    aten.bmm.default: {"rows of positions": lambda g: g.call(aten.bmm.default, g.x("r", "p", 4), g.x("r", 4, "p"))},
    aten.scatter.value: {"along positions": scattered(aten.scatter.value, 1, 3, value=1.5)},
    aten.scatter.src: {"along positions": scattered(aten.scatter.src, 1, 3)},
    aten.scatter_add.default: {"along positions": scattered(aten.scatter_add.default, 1, 3)},
    operator.getitem: {
        "sorted positions": then(call(aten.sort.default, "r", "p", 4, args=(1,)), lambda g, x: item(g, x)),
        "split rows": then(call(aten.chunk.default, "r", "p", 4, args=(1, 0)), lambda g, x: item(g, x)),
        "a norm of the batch": then(
            lambda g: g.call(aten.native_layer_norm.default, g.x("r", "p", 4), [g.size("p"), 4], None, None, 1e-5),
            lambda g, x: item(g, x),
        ),
    },
    **{target: {"mean": loss(target, 1), "sum": loss(target, 2)} for target in sorted(_UNREDUCED_LOSSES, key=str)},
    aten.view.default: {
        "positions change places": view("p", "r", 4),
        "rows into positions": view("r", 4, "p"),
        "numbers first": view(4, "r", "p"),
        "merged the other way round": then(view(("r", "p"), 4), lambda g, x: view("p", "r", 4)(g, x)),
        "numbers across positions": then(view("r", ("p", 4)), lambda g, x: view("r", 4, "p")(g, x)),
    },
    aten.reshape.default: {
        "what was turned, as if not": then(
            turned(1, 0, 2), lambda g, x: view("r", "p", 4, target=aten.reshape.default)(g, x)
        ),
        "turned numbers": then(turned(0, 2, 1), lambda g, x: view("r", "p", 4, target=aten.reshape.default)(g, x)),
    },
    aten._unsafe_view.default: {"positions change places": view("p", "r", 4, target=aten._unsafe_view.default)},
    aten.flatten.using_ints: {
        "positions and a part of rows": then(
            view(("r", "p"), 4),
            lambda g, x: g.call(
                aten.flatten.using_ints, g.call(aten.view.default, x, [g.size("p"), g.size("r"), 4]), 0, 1
            ),
        )
    },
    aten.unflatten.int: {
        "positions change places": then(
            view(("r", "p"), 4), lambda g, x: g.call(aten.unflatten.int, x, 0, [g.size("p"), g.size("r")])
        )
    },
}
for _target, _args in WITHOUT_DIMS.items():
    DECLINES[_target]["every number"] = call(_target, "r", "p", 4, args=_args)

# What no argument can make look across: elementwise on one tensor, and what only moves dimensions.
_ALWAYS = {
    *ELEMENTWISE, aten.to.dtype_layout, aten.type_as.default, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.masked_fill.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default,
} - {aten.masked_fill.Scalar}  # fmt: skip


# ------------------------------------------------------------------------------------------------ tests


def params(cases: Cases) -> list[Any]:
    return [
        pytest.param(target, write, id=f"{getattr(target, '__name__', target)}-{name}")
        for target, each in cases.items()
        for name, write in each.items()
    ]


def test_every_rule_has_cases() -> None:
    beside = {aten.matmul.default, operator.getitem, *_UNREDUCED_LOSSES}  # `rule_for` knows these without the table
    rules = {*RULES, *beside}
    assert not rules - set(PACKS), f"rules without a case in PACKS: {sorted(map(str, rules - set(PACKS)))}"
    bare = rules - set(DECLINES) - _ALWAYS
    assert not bare, f"rules without a case in DECLINES: {sorted(map(str, bare))}"
    gone = {
        target
        for target in {*PACKS, *DECLINES} - rules
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags
    }
    assert not gone, f"cases of operators that have no rule: {sorted(map(str, gone))}"
    assert set(RULES) >= VIEWS


def written(write: Write) -> tuple[PaddedGraph, fx.Node]:
    """The graph of a case, and the node that it is about."""
    g = PaddedGraph()
    node = write(g)
    value = node.meta["val"]
    if isinstance(value, (list, tuple)):
        g.output(*[g.call(operator.getitem, node, index) for index in range(len(value))])
    else:
        g.output(node)
    return g, node


@pytest.mark.parametrize(("target", "write"), params(DECLINES))
def test_what_looks_across_is_declined(target: Any, write: Write) -> None:
    g, node = written(write)
    assert node.target is target
    region = g.region()
    assert admitted_rule(node, region.seen) is None
    try:
        packed = Packed.of(g)
    except Declined:
        return  # nothing is left that could be packed
    assert node not in packed.region.entries
    for name in ("right", "drawn"):  # long enough for the slices here
        mask = batches()[name]
        values = g.values(mask, torch.Generator().manual_seed(0), {})
        for ours, theirs in zip(packed.run(mask, values), packed.padded(*values), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("target", "write"), params(PACKS))
def test_tokens_are_those_of_eager_and_follow_from_no_other(target: Any, write: Write) -> None:
    g, node = written(write)
    assert node.target is target
    packed = Packed.of(g)
    assert node in packed.region.entries, "the rule does not admit the call"
    results = next(iter(reversed(g.graph.nodes))).args[0]
    assert all(result in packed.region.entries for result in results)
    assert_tokens_as_eager(packed)


# ------------------------------------------------------------------------------------------------ claims of their own


def test_dropout_draws_for_every_token() -> None:
    g, node = written(call(aten.dropout.default, "r", "p", 40, args=(0.5, True)))
    packed = Packed.of(g)
    assert node in packed.region.entries
    mask = batches()["drawn"]
    values = g.values(mask, torch.Generator().manual_seed(0), {})
    [ours] = packed.run(mask, values)
    x = values[g.inputs.index(node.args[0])]
    assert (((ours == 0) | (ours == 2 * x))[mask]).all()
    assert 0.4 < (ours[mask] == 0).double().mean() < 0.6
    assert not ours[~mask].any()
    assert is_random(node)


@pytest.mark.parametrize("args", [(0.0, True), (0.5, False)], ids=["no probability", "evaluation"])
def test_dropout_that_drops_nothing_is_not_random(args: tuple[Any, ...]) -> None:
    _, node = written(call(aten.dropout.default, "r", "p", 4, args=args))
    assert not is_random(node)


@pytest.mark.parametrize(
    "target",
    [
        aten.bernoulli.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.native_dropout.default,
        aten.add_.Tensor,
        aten.relu_.default,
        aten.sort.stable,
        aten.cumprod.default,
        aten.convolution.default,
        aten.batch_norm.default,
        aten.group_norm.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.scaled_dot_product_attention.default,
        aten.cross_entropy_loss.default,
    ],
    ids=str,
)
def test_unknown_random_and_writing_operators_have_no_rule(target: Any) -> None:
    graph = fx.Graph()
    assert rule_for(graph.call_function(target, (graph.placeholder("x"),))) is None


def test_elementwise_noise_has_no_rule() -> None:
    library = torch.library.Library("deepytorch_rules", "DEF")
    seeded = torch.Tag.nondeterministic_seeded
    for name, tags in (("shift", (torch.Tag.pointwise,)), ("noise", (torch.Tag.pointwise, seeded))):
        library.define(f"{name}(Tensor x) -> Tensor", tags=tags)
    graph = fx.Graph()
    x, ops = graph.placeholder("x"), torch.ops.deepytorch_rules
    assert isinstance(rule_for(graph.call_function(ops.shift.default, (x,))), Pointwise)
    assert rule_for(graph.call_function(ops.noise.default, (x,))) is None
    library._destroy()


def _arguments(target: Any, tensors: Iterator[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a call of an operator, by the types of its schema."""
    simple = {"number": 2, "float": 0.5, "int": 1, "bool": False, "ScalarType": torch.float64}
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value: Any = next(tensors)
        elif argument.has_default_value():
            continue
        else:
            value = simple[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _pointwise() -> list[Any]:
    """Every operator of torch's that the rule of elementwise ones admits by its tag."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            target = getattr(packet, overload)
            if torch.Tag.pointwise in target.tags and overload != "out" and not target._schema.is_mutable:
                found.append(target)
    return found


def test_what_torch_calls_pointwise_is() -> None:
    """One entry of every operand changes: that entry of the output may follow, and no other."""
    tried, admitted = [], 0
    for target in _pointwise():
        graph = fx.Graph()
        rule = None if "matmul" in str(target) else rule_for(graph.call_function(target, (graph.placeholder("x"),)))
        if torch.Tag.nondeterministic_seeded in target.tags:
            assert rule is None or target is aten.dropout.default
            continue
        assert isinstance(rule, Pointwise)
        admitted += 1
        for whole in (False, True):
            generator = torch.Generator().manual_seed(0)
            makes = (torch.randint(1, 4, (2, 5), generator=generator) if whole
                     else torch.rand(2, 5, dtype=torch.float64, generator=generator) * 0.8 + 0.1
                     for _ in iter(int, 1))  # fmt: skip
            try:
                args, kwargs = _arguments(target, makes)
                before = target(*args, **kwargs)
            except (RuntimeError, KeyError, TypeError, IndexError, NotImplementedError):
                continue  # takes other types than these
            others = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
            for value in others:
                if isinstance(value, torch.Tensor):
                    value[1, 3] = value[0, 0] + (1 if whole else 0.05)
            after = target(*others, **kwargs)
            results = [list(each) if isinstance(each, tuple) else [each] for each in (before, after)]
            for one, other in zip(*results, strict=True):
                if isinstance(one, torch.Tensor) and one.shape == (2, 5):
                    same = (one == other) | (one != one) & (other != other)
                    same[1, 3] = True
                    assert same.all(), f"{target} looks across"
            tried.append(target)
            break
    assert len(tried) > 0.75 * admitted > 150
