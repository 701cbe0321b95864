"""Recognition of attentions in a graph, and of the terms added to their scores.

An attention is SDPA, or matmul - softmax - matmul written out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepytorch.passes.graphs import PRODUCTS, QUOTIENTS, arguments_of, match_softcap, number_of
from deepytorch.passes.unpad.layout import VIEWS

aten = torch.ops.aten

# A score lowered by this amount gets a weight of exactly zero: exp(-1e4 + difference) underflows for any difference
# below 9,900.
MASKED = -1e4


@dataclass(frozen=True)
class Attention:
    """One attention in padded form: `output = softmax(query @ key / ... + terms) @ value`.

    `query` is (..., positions_q, head_dim). `key` is (..., positions_k, head_dim) for SDPA, and (..., head_dim,
    positions_k) if the attention is written out; the layouts of both tell. `terms` are added to the scaled scores.
    `sinks` (1, heads, 1, 1) or (1, heads, 1) is the score of a key that no value stands behind; (rows, heads,
    positions_q, 1) if each query has its own. `empty_is_nan`: a query whose scores are all minus infinity gets NaN, as
    it does where the softmax is written out. (SDPA gives it zeros.)
    """

    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    key_is_transposed: bool
    causal: bool = False
    dropout_p: float = 0.0
    softcap: float = 0.0
    terms: tuple[Term, ...] = ()
    inner: tuple[fx.Node, ...] = ()  # the nodes that the packed form replaces, including the output
    mask_dtype: torch.dtype | None = None
    sinks: fx.Node | None = None
    empty_is_nan: bool = False

    def is_merged(self, node: fx.Node) -> bool:
        """Return whether a term's first dimension is rows and heads, or 1: it is added to scores of such dimensions."""
        return any(term.node is node and term.ndim == 3 for term in self.terms)


@dataclass(frozen=True)
class Term:
    """A term added to the scores.

    `kind`: "visible" (true where seen), "hidden" (true where not seen), "added", or "factor" (of scores to which
    nothing has been added yet). `ndim`: number of dimensions of the scores at the addition: 3 if rows and heads are
    merged, else 4. `infinite`: what is not seen gets minus infinity; of an added term its values tell.
    """

    node: fx.Node
    kind: str
    ndim: int = 4
    infinite: bool = False


def find_attentions(graph: fx.Graph) -> list[Attention]:
    """Return every attention of the graph whose inner values no other node reads."""
    found = []
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            found.append(_fused(node))
        elif node.target in (aten.softmax.int, aten._softmax.default):
            attention = _spelled_out(node)
            if attention is not None:
                found.append(attention)
    return found


def _fused(node: fx.Node) -> Attention:
    arguments = arguments_of(node)
    query, mask = arguments["query"], arguments["attn_mask"]
    terms: tuple[Term, ...] = ()
    if mask is not None:
        is_bool = mask.meta["val"].dtype is torch.bool
        ndim = query.meta["val"].dim()
        terms = (Term(mask, "visible", ndim),) if is_bool else tuple(split_terms(mask, ndim))
    scale = arguments["scale"]
    return Attention(
        output=node,
        query=query,
        key=arguments["key"],
        value=arguments["value"],
        scale=1.0 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale,
        key_is_transposed=False,
        causal=bool(arguments["is_causal"]),
        dropout_p=float(arguments["dropout_p"]),
        terms=terms,
        inner=(node,),
    )


_CASTS = frozenset({
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default, aten._to_copy.default,
    aten.contiguous.default, aten.clone.default,
})  # fmt: skip
_SCALINGS = frozenset({*PRODUCTS, *QUOTIENTS})
_ADDS_A_TERM = frozenset({
    aten.baddbmm.default, aten.add.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.ScalarOther,
    aten.where.self,
})  # fmt: skip
_BOUNDS = frozenset({aten.maximum.default, aten.max.other})
_PRODUCTS = frozenset({aten.matmul.default, aten.bmm.default})


def _spelled_out(softmax: fx.Node) -> Attention | None:
    value = softmax.meta.get("val")
    if not isinstance(value, torch.Tensor) or softmax.args[1] not in (-1, value.dim() - 1):
        return None
    scores, weights, sinks, beside = _without_sinks(softmax)
    up = _scores(scores)
    down = _weighted_sum(weights)
    if up is None or down is None:
        return None
    query, key, scale, softcap, terms, above = up
    bounded = any(node.target in _BOUNDS for node in above)
    dropout_p, product, below = down
    output = product
    scaling: list[fx.Node] = []
    if sinks is None and (found := _scaled_by_sinks(scores, product)) is not None:
        sinks, scaling = found
        output = scaling[-1]
    inner = [*above, *beside, softmax, *below, *scaling]
    if not _closed(inner, output):
        return None
    return Attention(
        output=output,
        query=query,
        key=key,
        value=product.args[1],
        scale=scale,
        key_is_transposed=True,
        dropout_p=dropout_p,
        softcap=softcap,
        terms=tuple(terms),
        inner=tuple(inner),
        sinks=sinks,
        empty_is_nan=not bounded and (sinks is None or bool(scaling)),
    )


def _without_sinks(softmax: fx.Node) -> tuple[Any, fx.Node, fx.Node | None, list[fx.Node]]:
    """Return the scores of the keys, their weights, the sinks, and the nodes of the sinks' column.

    The column is appended before the softmax and dropped behind it: `softmax(cat([scores, sinks]))[..., :-1]`. Without
    one, the scores are those of the softmax, and the weights its result.
    """
    beside: list[fx.Node] = []
    scores: Any = softmax.args[0]
    if _is_less_its_maximum(scores):
        maximum = scores.args[1]
        beside += [scores, maximum, *([maximum.args[0]] if maximum.target is operator.getitem else [])]
        scores = scores.args[0]
    without = scores, softmax, None, beside
    dropped: Any = next(iter(softmax.users), None)
    if scores.target is not aten.cat.default or len(softmax.users) != 1 or dropped.target is not aten.slice.Tensor:
        return without
    parts, last = scores.args[0], scores.meta["val"].dim() - 1
    if len(parts) != 2 or last != 3 or arguments_of(scores)["dim"] % 4 != last:
        return without
    given = arguments_of(dropped)
    drops_one = (given["dim"] % 4, given["start"] or 0, given["end"], given["step"]) == (last, 0, -1, 1)
    if not drops_one or parts[1].meta["val"].shape[last] != 1:
        return without
    if parts[1].target is aten.expand.default and _is_alike_for_queries(parts[1].args[0]):
        return parts[0], dropped, parts[1].args[0], [*beside, scores, parts[1], dropped]
    return parts[0], dropped, parts[1], [*beside, scores, dropped]


def _is_alike_for_queries(sinks: fx.Node) -> bool:
    """Return whether sinks are (1, heads, 1, 1)."""
    shape = sinks.meta["val"].shape
    return len(shape) == 4 and shape[0] == shape[2] == shape[3] == 1


def _scaled_by_sinks(scores: fx.Node, product: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Match `product * sigmoid(logsumexp(scores) - sinks)`, which equals a column of sinks beside the scores.

    Return the sinks and the nodes from the logsumexp to the scaled product.
    """
    node = next((user for user in scores.users if user.target is aten.logsumexp.default), None)
    if node is None or arguments_of(node)["dim"] not in ([-1], [3]) or arguments_of(node)["keepdim"]:
        return None
    nodes, sinks = [node], None
    for wanted in (aten.sub.Tensor, aten.sigmoid.default, aten.unsqueeze.default, aten.mul.Tensor):
        while len(node.users) == 1 and (user := next(iter(node.users))).target in _CASTS:
            nodes.append(node := user)
        if len(node.users) != 1 or (user := next(iter(node.users))).target is not wanted or user.kwargs:
            return None
        if wanted is aten.sub.Tensor:
            sinks = user.args[1] if user.args[0] is node else None
        elif wanted is aten.unsqueeze.default and user.args[1] not in (-1, 3):
            return None
        nodes.append(node := user)
    if set(node.args) != {product, nodes[-2]} or not isinstance(sinks, fx.Node):
        return None
    shape = sinks.meta["val"].shape
    return (sinks, nodes) if len(shape) == 3 and shape[0] == shape[2] == 1 else None


def _is_less_its_maximum(node: Any) -> bool:
    """Return whether a value is `x - x.max(-1, keepdim=True)`, whose softmax is that of `x`."""
    if node.target is not aten.sub.Tensor or not isinstance(node.args[1], fx.Node) or node.kwargs:
        return False
    maximum = node.args[1]
    if maximum.target is operator.getitem and maximum.args[1] == 0:
        maximum = maximum.args[0]
    if maximum.target not in (aten.max.dim, aten.amax.default) or maximum.args[0] is not node.args[0]:
        return False
    given = arguments_of(maximum)
    last = node.meta["val"].dim() - 1
    return given["keepdim"] is True and given["dim"] in (-1, last, [-1], [last])


def _closed(inner: list[fx.Node], output: fx.Node) -> bool:
    """Return whether only nodes of the pattern read the pattern's inner values."""
    members = set(inner)
    return all(user in members for node in inner if node is not output for user in node.users)


def _scores(node: fx.Node) -> tuple[fx.Node, fx.Node, float, float, list[Term], list[fx.Node]] | None:
    """Walk up from a softmax's input to the product of queries and keys: (query, key, scale, softcap, terms, nodes)."""
    scale, softcap, has_factor = 1.0, 0.0, False
    terms: list[Term] = []
    inner: list[fx.Node] = []
    while True:
        inner.append(node)
        target, args, ndim = node.target, node.args, node.meta["val"].dim()
        if target in _PRODUCTS:
            return args[0], args[1], scale, softcap, terms, inner
        if target in _ADDS_A_TERM and (scale != 1.0 or softcap or has_factor):
            return None  # a term that is scaled after its addition would no longer be a term of the scaled scores
        if target is aten.baddbmm.default:
            if node.kwargs.get("beta", 1) != 1:
                return None
            terms.extend(split_terms(args[0], ndim))
            return args[1], args[2], float(node.kwargs.get("alpha", 1)), softcap, terms, inner
        if target in _CASTS or _splits_heads(node):
            node = args[0]
        elif target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            side = _towards_product(args)
            if side is None:
                return None
            if not _is_finite(args[1 - side]):  # a number that is added to all scores changes no probability
                terms.extend(split_terms(args[1 - side], ndim))
            node = args[side]
        elif target in _BOUNDS and (number := number_of(args[1])) is not None and number <= MASKED:
            node = args[0]  # no score of a key that is seen is so low
        elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _is_masking(args[2]):
            terms.append(Term(args[1], "hidden", ndim, _is_infinite(args[2])))
            node = args[0]
        elif target in (aten.where.ScalarOther, aten.where.self) and _is_masking(args[2]):
            if isinstance(args[2], fx.Node) and node.args[1] in args[2].all_input_nodes:
                inner.append(args[2])  # full_like(scores, low) reads only the shape of the scores
            terms.append(Term(args[0], "visible", ndim, _is_infinite(args[2])))
            node = args[1]
        elif target in _SCALINGS and (number := number_of(args[1])) is not None:
            capped = match_softcap(node)
            if capped is not None and not softcap and scale == 1.0:
                softcap, node, between = capped
                inner.extend(between)
                continue
            scale *= number if target in PRODUCTS else 1.0 / number
            node = args[0]
        elif target is aten.mul.Tensor and (side := _towards_product(args)) is not None and _is_tensor(args[1 - side]):
            terms.append(Term(args[1 - side], "factor", ndim))  # `scores * causal - 1e4 * (1 - causal)`
            has_factor = True
            node = args[side]
        else:
            return None
        if not isinstance(node, fx.Node) or (softcap and scale != 1.0 and node.target is aten.tanh.default):
            return None


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    number = number_of(value)
    return number is not None and math.isfinite(number)


def _towards_product(args: tuple[Any, ...]) -> int | None:
    """Return which of two operands, 0 or 1, comes from a product of two activations."""
    for side in (0, 1):
        node = args[side]
        while isinstance(node, fx.Node):
            if node.target in _PRODUCTS or node.target is aten.baddbmm.default:
                return side
            if node.target not in _CHAIN and not _splits_heads(node):
                break
            node = node.args[1] if node.target in (aten.where.ScalarOther, aten.where.self) else node.args[0]
    return None


_CHAIN = _CASTS | _SCALINGS | _ADDS_A_TERM | _BOUNDS | {aten.tanh.default}


def _weighted_sum(weights: fx.Node) -> tuple[float, fx.Node, list[fx.Node]] | None:
    """Walk down from the weights of the keys through casts and dropout to the product with the values."""
    node, dropout_p = weights, 0.0
    inner: list[fx.Node] = []
    while True:
        users = list(node.users)
        if len(users) != 1:
            return None
        user = users[0]
        if user.target in _PRODUCTS:
            if user.args[0] is not node or not isinstance(user.args[1], fx.Node):
                return None
            return dropout_p, user, [*inner, user]
        if user.target is aten.dropout.default and dropout_p == 0.0:
            dropout_p = float(user.args[1]) if user.args[2] else 0.0
        elif user.target not in _CASTS and not _splits_heads(user):
            return None
        inner.append(user)
        node = user


def split_terms(node: fx.Node, ndim: int) -> Iterator[Term]:
    """Split an additive mask into its terms: what is added, and where scores are replaced by a very low number."""
    target, args = node.target, node.args
    if target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1 and all(isinstance(a, fx.Node) for a in args):
        yield from split_terms(args[0], ndim)
        yield from split_terms(args[1], ndim)
    elif target in (aten.contiguous.default, aten.clone.default, aten.expand.default) and _same_rank(node):
        yield from split_terms(args[0], ndim)
    elif target in (aten.where.ScalarOther, aten.where.self) and _is_masking(args[2]) and _is_tensor(args[1]):
        yield Term(args[0], "visible", ndim, _is_infinite(args[2]))
        yield from split_terms(args[1], ndim)
    elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _is_masking(args[2]):
        yield from split_terms(args[0], ndim)
        yield Term(args[1], "hidden", ndim, _is_infinite(args[2]))
    else:
        yield Term(node, "added", ndim)


def _splits_heads(node: fx.Node) -> bool:
    """Return whether a node is a view that splits or merges rows and heads and leaves every score in place."""
    if node.target not in VIEWS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    return (
        len(before) in (3, 4) and len(after) in (3, 4) and [str(s) for s in before[-2:]] == [str(s) for s in after[-2:]]
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() > 0


def _same_rank(node: fx.Node) -> bool:
    return node.meta["val"].dim() == node.args[0].meta["val"].dim()


_FILLS = {aten.full_like.default: 1, aten.full.default: 1, aten.new_full.default: 2}


def _is_masking(value: Any) -> bool:
    number = _filled_with(value)
    return number is not None and number <= MASKED


def _is_infinite(value: Any) -> bool:
    return _filled_with(value) == -math.inf


def _filled_with(value: Any) -> float | None:
    if isinstance(value, fx.Node) and value.target in _FILLS:
        value = value.args[_FILLS[value.target]]
    return number_of(value)
