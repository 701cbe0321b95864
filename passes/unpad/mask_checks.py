"""Masks whose meaning probes cannot settle, and the comparison of such a mask with its meaning in each step.

[Note: what probes settle]
A mask that is computed, place by place and by moves of values, from one token mask can only tell apart which of a few
places hold a token, and probes of random tokens show all of these cases. Two things lie beyond that. A mask that reads
a second value of the batch (prompts that see each other, segments) may act on values that no probe held together. A
mask that sums over a row may change at a count that no probe reached. Their meaning holds for the probes alone, so each
batch is asked: the mask is computed whole, and compared.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.slicing import Slicer, writes_in_place
from deepytorch.passes.unpad.attentions import MASKED, Term
from deepytorch.torch_internals import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class MaskCheck:
    """A comparison that each step has to make: the mask of `terms` with a meaning.

    The meaning is that query i sees key j iff i - left <= j <= i + right (-1: no limit) and j is a token.

    Attributes:
        terms: of the mask.
        tokens: the value that the token mask is read from; it has one entry per row and key.
        dims: its dimensions of rows and keys.
        reading: the name in `masks.READINGS` of the rule that finds tokens in it.
        window: left and right.
        same_space: whether queries are the same positions as keys, so that queries that are no tokens do not count.
    """

    terms: tuple[Term, ...]
    tokens: fx.Node
    dims: tuple[int, int]
    reading: str
    window: tuple[int, int]
    same_space: bool

    @property
    def nodes(self) -> list[fx.Node]:
        """Return the values that are compared."""
        return [*(term.node for term in self.terms), self.tokens]


_LOCAL = frozenset({
    # place by place, where torch does not say so itself
    "__and__", "__or__", "__xor__", "rsub", "where", "masked_fill", "to", "_to_copy", "type_as", "full_like",
    "ones_like", "zeros_like",
    # moves
    "clone", "contiguous", "detach", "alias", "view", "reshape", "expand", "unsqueeze", "squeeze", "permute",
    "transpose", "t", "slice", "select", "cat", "stack", "flatten", "unflatten", "tril", "triu", "pad",
    "constant_pad_nd", "expand_as", "flip", "repeat", "repeat_interleave", "index", "gather", "index_select",
})  # fmt: skip
_BY_INDEX = frozenset({"index", "gather", "index_select"})


def is_settled(terms: Sequence[Term], tokens: fx.Node, domain: str, slicer: Slicer) -> bool:
    """Return whether probes settle what a mask means; see [Note: what probes settle].

    tokens: the value from which the token mask was read. domain: what the inputs that it is computed from hold.
    """
    if not _has_two_values(tokens, domain, slicer):
        return False
    part = slicer.slice([term.node for term in terms], stop=frozenset({tokens}))
    wanted = {term.node for term in terms}
    return not _reads_batch(part, wanted) and _is_local(part, {tokens})


def _has_two_values(tokens: fx.Node, domain: str, slicer: Slicer) -> bool:
    """Return whether a place of the value tells no more than whether a token stands there.

    It follows, place by place, from one value that is true or false, or from one input that holds two numbers.
    """
    whole = slicer.slice([tokens])
    two = {node for node in whole if _is_bool(node) or (domain != "any" and _is_batch_input(node))}
    part = slicer.slice([tokens], stop=frozenset(two))
    inside = {*part, tokens}
    sources = {tokens} if tokens in two else {node for node in two if inside.intersection(node.users)}
    return len(sources) == 1 and not _reads_batch(part, {tokens}) and _is_local(part, sources)


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_batch_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["input"].role is Role.BATCH


def _reads_batch(part: Sequence[fx.Node], wanted: set[fx.Node]) -> bool:
    """Return whether a part reads a value of the batch, and not only its sizes."""
    inside = set(part)
    return any(
        _is_batch_input(node)
        and (node in wanted or any(user in inside and user.target is not aten.sym_size.int for user in node.users))
        for node in part
    )


def _is_local(part: Sequence[fx.Node], tokens: set[fx.Node]) -> bool:
    """Return whether whatever follows from `tokens` is computed place by place, and by moves of values."""
    following = set(tokens)
    for node in part:
        if node in following or not following.intersection(node.all_input_nodes):
            continue
        if node.target in (aten.sym_size.int, operator.getitem):
            if node.target is operator.getitem:
                following.add(node)
            continue
        if not isinstance(node.target, OpOverload) or writes_in_place(node):
            return False
        name = node.target._schema.name.split("::")[-1]
        if name not in _LOCAL and torch.Tag.pointwise not in node.target.tags:
            return False
        if name in _BY_INDEX and following.intersection(_places(node)):
            return False
        following.add(node)
    return not any(writes_in_place(node) for node in part)


def _places(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an indexing operator that say where it reads."""
    return [each for each in node.all_input_nodes if each is not node.args[0]]


def mask_differs(
    values: Sequence[torch.Tensor],
    kinds: Sequence[tuple[str, int]],
    tokens: torch.Tensor,
    window: tuple[int, int],
    same_space: bool,
) -> torch.Tensor:
    """Return for each row (rows,) bool whether its mask says anything else than its meaning; see `MaskCheck`.

    values, kinds: of the terms; each kind with the number of dimensions of the scores. tokens: (rows, keys) bool.
    """
    rows, keys = tokens.shape
    expected = there = tokens[:, None, None, :]
    if window != (-1, -1):
        places = torch.arange(keys, device=tokens.device)
        offset = places - places[:, None]
        for limit, distance in zip(window, (-offset, offset), strict=True):
            if limit >= 0:
                expected = expected & (distance <= limit)
    visible = torch.ones_like(there)
    differs = torch.zeros_like(there)
    for value, (kind, ndim) in zip(values, kinds, strict=True):
        score = scores_of(value, ndim, rows)
        if kind == "factor":  # one where it is seen, zero or one elsewhere
            differs = differs | ((score != 1) & ((score != 0) | expected))
        elif kind == "added":
            visible, differs = visible & (score > MASKED), differs | score.isnan()
        else:
            visible = visible & (score.bool() if kind == "visible" else ~score.bool())
    differs = differs | (visible != expected)
    if same_space:
        differs = differs & there.transpose(2, 3)
    return differs.flatten(1).any(1)


def scores_of(value: torch.Tensor, ndim: int, rows: int) -> torch.Tensor:
    """Return a term's values as (1 or rows, 1 or heads, 1 or queries, 1 or keys).

    ndim: of the scores; 3 if rows and heads are merged, as in nn.MultiheadAttention.

    Raises:
        ValueError: they cannot be brought to that form.
    """
    if ndim == 3 and value.dim() == 3 and value.shape[0] != 1:
        if value.shape[0] % rows:
            raise ValueError("does not have a row's dimension first")
        value = value.reshape(rows, -1, *value.shape[1:])
    while value.dim() < 4:
        value = value.unsqueeze(0)
    if value.dim() > 4 or value.shape[0] not in (1, rows):
        raise ValueError(f"has the sizes {tuple(value.shape)} in a batch of {rows} rows")
    return value
