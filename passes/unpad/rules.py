"""Rules: which operators work position by position, and what each becomes on packed tokens.

A rule answers two questions about one node of a padded graph. `admits`: does the output at a token follow from the
inputs at that token alone (and from values that are the same for all tokens, for a row or for a position)? `emit`: what
is the same computation on packed values, whose first dimension counts tokens and which keep the padded value's other
dimensions in their order?

An operator without a rule stays padded. Rules are keyed by overload and by `torch.Tag.pointwise`, never by model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from deepytorch.passes.graphs import arguments_of
from deepytorch.passes.unpad.layout import (
    VIEWS,
    Dim,
    Layout,
    Positions,
    is_token,
    packed_dim,
    packed_sizes,
    repeats,
    sorted_of,
    token_dims,
    vanishes,
)
from deepytorch.passes.unpad.program import IndexSet
from deepytorch.torch_internals import OpOverload

if TYPE_CHECKING:
    from deepytorch.passes.unpad.emit import Emitter

aten = torch.ops.aten
Layouts = Mapping[Any, Layout]  # of nodes; other arguments, such as numbers, have none


class Rule(ABC):
    """The behaviour of one kind of operator on tokens."""

    @abstractmethod
    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        """Return whether `node`, whose output has one entry per token, works token by token."""

    @abstractmethod
    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        """Add the packed form of `node` to the emitter's graph, for these entries of the token space."""


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments that are tensors (or lists of tensors, for `getitem`)."""
    return [source for source in node.all_input_nodes if _is_value(source)]


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))


def broadcasts(layout: Layout | None, out: Layout, from_batch: bool) -> bool:
    """Return whether an operand of this layout lines up with `out`, dimension by dimension from the right."""
    if layout is None or len(layout) > len(out):
        return False
    for dim, target in zip(reversed(layout), reversed(out), strict=False):
        if dim == () or dim == target:
            continue
        if from_batch and _same_grid(dim, target):
            continue
        return False
    if is_token(layout):
        return token_dims(layout) == [index - (len(out) - len(layout)) for index in token_dims(out)]
    # A value that is constant along rows or positions is gathered whole, so its one token dimension must not be merged.
    return all(len(layout[index]) == 1 for index in token_dims(layout)) and len(token_dims(layout)) <= 1


def _same_grid(dim: Dim, target: Dim) -> bool:
    """Return whether two dimensions are equal except for where positions start.

    The start has no meaning for values computed from the batch alone.
    """
    if len(dim) != len(target):
        return False
    for atom, other in zip(dim, target, strict=True):
        if type(atom) is Positions and type(other) is Positions:
            if (atom.symbol, atom.cut) != (other.symbol, other.cut):
                return False
        elif atom != other:
            return False
    return True


@dataclass(frozen=True)
class Pointwise(Rule):
    """Elementwise arithmetic with broadcasting, casts, dropout."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        out = layouts[node]
        if node.kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
            return False  # packed values have fewer dimensions than the memory format needs
        return all(broadcasts(layouts.get(source), out, from_batch[source]) for source in tensor_inputs(node))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        out = emitter.layouts[node]
        args = fx.node.map_arg(node.args, lambda source: emitter.aligned(source, out, entries))
        kwargs = fx.node.map_arg(node.kwargs, lambda source: emitter.aligned(source, out, entries))
        return emitter.call(node.target, args, kwargs)


@dataclass(frozen=True)
class Linear(Rule):
    """`x @ weight (+ bias)` on the last dimension: linear, addmm, mm, matmul with a weight."""

    x: int = 0
    others: tuple[int, ...] = (1, 2)

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = layouts.get(node.args[self.x])
        if x is None or not is_token(x) or not _plain(x[-1]):
            return False
        for index in self.others:
            other = node.args[index] if index < len(node.args) else None
            if isinstance(other, fx.Node):
                layout = layouts.get(other)
                if layout is None or token_dims(layout) or len(layout) > 2:
                    return False
        if node.target in (aten.mm.default, aten.addmm.default) and len(packed_sizes(x)) != 1:
            return False  # mm takes two dimensions: none is left for a plain size merged with the rows, such as heads
        return x[:-1] == layouts[node][:-1] and _plain(layouts[node][-1])

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        return _packed_call(node, self.x, emitter, entries)


@dataclass(frozen=True)
class PerTokenMatmul(Rule):
    """A product of two matrices where every token has its own pair."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        a, b = (layouts.get(source) for source in node.args[:2])
        if a is None or b is None or len(a) < 3 or len(a) != len(b) or not (is_token(a) and is_token(b)):
            return False
        return a[:-2] == b[:-2] == layouts[node][:-2] and all(_plain(dim) for dim in (*a[-2:], *b[-2:]))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        return emitter.call(aten.matmul.default, tuple(emitter.packed(source, entries) for source in node.args[:2]))


@dataclass(frozen=True)
class Norm(Rule):
    """Normalisation over the last dimensions: layer_norm, rms_norm."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = layouts.get(node.args[0])
        over = len(node.args[1])  # type: ignore[arg-type]
        if x is None or not is_token(x) or x != layouts[node] or not all(_plain(dim) for dim in x[-over:]):
            return False
        weights = [source for source in tensor_inputs(node) if source is not node.args[0]]
        return all(source in layouts and not token_dims(layouts[source]) for source in weights)

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        return _packed_call(node, 0, emitter, entries)


@dataclass(frozen=True)
class AlongPlain(Rule):
    """An operator along dimensions that are neither rows nor positions: reductions, softmax, slices, sorts.

    `name` is the argument that holds the dimension or the dimensions. Tensor arguments other than the first (an index)
    must have one entry per token as well.
    """

    name: str = "dim"

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = layouts.get(node.args[0])
        if x is None or not is_token(x):
            return False
        dims = self._dims(node, len(x))
        if dims is None or not all(_plain(x[dim]) for dim in dims):
            return False
        others = [source for source in tensor_inputs(node) if source is not node.args[0]]
        for source in others:
            layout = layouts.get(source)
            if layout is None or len(layout) != len(x) or not is_token(layout):
                return False
            if token_dims(layout) != token_dims(x) or any(layout[dim] != x[dim] for dim in token_dims(x)):
                return False  # an index (rows, 2, positions) looks up positions 0 and 1 of (rows, positions, n)
        out = layouts.get(node)
        return out is None or is_token(out)

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        x = emitter.layouts[node.args[0]]
        arguments = arguments_of(node)
        dims = self._dims(node, len(x)) or []
        mapped = [packed_dim(x, dim) for dim in dims]
        given = arguments[self.name]
        arguments[self.name] = mapped if isinstance(given, (list, tuple)) else mapped[0]
        return emitter.call_named(
            node.target,
            arguments,
            lambda source: emitter.packed(source, entries) if _is_value(source) else emitter.padded(source),
        )

    def _dims(self, node: fx.Node, ndim: int) -> list[int] | None:
        given = arguments_of(node).get(self.name)
        if given is None:
            return None
        dims = given if isinstance(given, (list, tuple)) else [given]
        if not dims or not all(isinstance(dim, int) for dim in dims):
            return None
        return [dim % ndim for dim in dims]


@dataclass(frozen=True)
class Reshape(Rule):
    """Views that keep every token's numbers together and in order, and dimensions of size 1 put in or taken out."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        return is_token(layouts.get(node.args[0]))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        x = emitter.packed(node.args[0], entries)
        before, after = packed_sizes(emitter.layouts[node.args[0]]), packed_sizes(emitter.layouts[node])
        return x if before == after else emitter.call(aten.reshape.default, (x, [-1, *after]))


@dataclass(frozen=True)
class Permute(Rule):
    """Reorderings of dimensions.

    Rows and positions have one fixed place in a packed value, so often nothing is left to do.
    """

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = layouts.get(node.args[0])
        return x is not None and is_token(x) and sorted(map(repr, x)) == sorted(map(repr, layouts[node]))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        layout = emitter.layouts[node.args[0]]
        order = permutation(node, len(layout))
        kept = [dim for dim in order if not vanishes(layout[dim])]
        x = emitter.packed(node.args[0], entries)
        if kept == sorted(kept):
            return x
        return emitter.call(aten.permute.default, (x, [0, *(packed_dim(layout, dim) for dim in kept)]))


def permutation(node: fx.Node, ndim: int) -> list[int]:
    """Return, for each dimension of the output, the corresponding dimension of the input."""
    order = list(range(ndim))
    if node.target is aten.permute.default:
        return [dim % ndim for dim in node.args[1]]  # type: ignore[union-attr]
    first, second = (-1, -2) if len(node.args) < 3 else (node.args[1], node.args[2])
    if node.target is aten.t.default:
        first, second = 0, ndim - 1
    first, second = first % ndim, second % ndim  # type: ignore[operator]
    order[first], order[second] = order[second], order[first]
    return order


@dataclass(frozen=True)
class Expand(Rule):
    """Repeats along plain dimensions, or of a value without rows (or positions) along them."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = node.args[0]
        if sorted_of(layouts[node]) is not None:  # a token has several entries
            return False
        return isinstance(x, fx.Node) and broadcasts(layouts.get(x), layouts[node], from_batch[x])

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        out = emitter.layouts[node]
        x = emitter.aligned(node.args[0], out, entries)
        return emitter.call(aten.expand.default, (x, [emitter.count(entries), *packed_sizes(out)]))


@dataclass(frozen=True)
class Slice(Rule):
    """Slices along plain dimensions, whole slices, and prefixes or suffixes of the positions."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        return is_token(layouts.get(node.args[0]))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        before, after = emitter.layouts[node.args[0]], emitter.layouts[node]
        x = emitter.packed(node.args[0], entries)
        if packed_sizes(before) == packed_sizes(after):
            return x
        dim = arguments_of(node)["dim"] % len(before)
        return emitter.call(aten.slice.Tensor, (x, packed_dim(before, dim), *emitter.copied(node.args[2:])))


@dataclass(frozen=True)
class Cat(Rule):
    """Concatenation along a plain dimension."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        out = layouts[node]
        dim = arguments_of(node)["dim"] % len(out)
        if not _plain(out[dim]):
            return False
        for source in node.args[0]:  # type: ignore[union-attr]
            layout = layouts.get(source)
            if layout is None or not is_token(layout):
                return False
            others = [other for index, other in enumerate(layout) if index != dim]
            if node.target is aten.cat.default and others != [other for index, other in enumerate(out) if index != dim]:
                return False
            if node.target is aten.stack.default and layout != (*out[:dim], *out[dim + 1 :]):
                return False
        return True

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        out = emitter.layouts[node]
        dim = arguments_of(node)["dim"] % len(out)
        parts = [emitter.packed(source, entries) for source in node.args[0]]  # type: ignore[union-attr]
        return emitter.call(node.target, (parts, packed_dim(out, dim)))


@dataclass(frozen=True)
class Embedding(Rule):
    """A lookup of a table's rows by token ids."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        table, ids = node.args[:2]
        if not is_token(layouts.get(ids)) or table not in layouts:
            return False
        if arguments_of(node)["scale_grad_by_freq"]:  # the scaling counts the ids of the whole batch, including pads
            return False
        return not token_dims(layouts[table])

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        return _packed_call(node, 1, emitter, entries)


@dataclass(frozen=True)
class Lookup(Rule):
    """A lookup by whole numbers: of parts of a table by a number of each token, or of features by constants.

    `table[experts]`, `x[..., [0, 2], :]`.
    """

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        table, indices = node.args[:2]
        if _picked_features(node, layouts) is not None:
            return True
        if len(indices) != 1 or not isinstance(indices[0], fx.Node) or table not in layouts:  # type: ignore[arg-type, index]
            return False
        numbers = indices[0]  # type: ignore[index]
        if numbers.meta["val"].dtype not in (torch.int32, torch.int64) or not is_token(layouts.get(numbers)):
            return False
        return not token_dims(layouts[table]) and layouts[node] == (*layouts[numbers], *layouts[table][1:])

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        picked = _picked_features(node, emitter.layouts)
        if picked is not None:
            dim, index = picked
            x = emitter.packed(node.args[0], entries)
            before = [None] * (packed_dim(emitter.layouts[node.args[0]], dim) or 0)
            return emitter.call(aten.index.Tensor, (x, [*before, emitter.padded(index)]))
        table, (numbers,) = node.args[:2]  # type: ignore[misc]
        return emitter.call(aten.index.Tensor, (emitter.padded(table), [emitter.packed(numbers, entries)]))  # type: ignore[arg-type]


def _picked_features(node: fx.Node, layouts: Layouts) -> tuple[int, fx.Node] | None:
    """Return the plain dimension that is indexed by numbers alike for all tokens, and the index; None if not so."""
    x = layouts.get(node.args[0])
    given = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]  # type: ignore[arg-type]
    if x is None or not is_token(x) or len(given) != 1 or not isinstance(given[0][1], fx.Node):
        return None
    dim, index = given[0]
    own = layouts.get(index)
    if (
        own is None
        or token_dims(own)
        or index.meta["val"].dtype not in (torch.int32, torch.int64)
        or not _plain(x[dim])
    ):
        return None
    return (dim, index) if layouts[node] == (*x[:dim], *own, *x[dim + 1 :]) else None


@dataclass(frozen=True)
class Repeat(Rule):
    """Copies of all features, one behind the other, along plain dimensions."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x, out = layouts.get(node.args[0]), layouts[node]
        times: Any = node.args[1]
        if x is None or not is_token(x) or len(times) != len(x) or not all(isinstance(each, int) for each in times):
            return False
        return all(each == 1 or _plain(dim) for each, dim in zip(times, x, strict=True)) and token_dims(
            x
        ) == token_dims(out)

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        x, times = emitter.layouts[node.args[0]], node.args[1]
        kept = [each for each, dim in zip(times, x, strict=True) if not vanishes(dim)]  # type: ignore[arg-type]
        return emitter.call(node.target, (emitter.packed(node.args[0], entries), [1, *kept]))


@dataclass(frozen=True)
class Item(Rule):
    """One output of an operator that has several."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        parent = node.args[0]
        rule = rule_for(parent)  # type: ignore[arg-type]
        return isinstance(rule, AlongPlain) and rule.admits(parent, layouts, from_batch)  # type: ignore[arg-type]

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        home = emitter.entries[node.args[0]]  # type: ignore[index]
        made = emitter.call(node.target, (emitter.packed(node.args[0], home), node.args[1]))
        return emitter.narrowed(made, home, entries)  # other results may be wanted at more tokens than this one


def _packed_call(node: fx.Node, place: int, emitter: Emitter, entries: IndexSet) -> fx.Node:
    """Add the same call with one argument packed."""
    args = [
        emitter.packed(given, entries) if index == place else emitter.copied(given)
        for index, given in enumerate(node.args)
    ]
    return emitter.call(node.target, tuple(args), emitter.copied(node.kwargs))


def _plain(dim: Dim) -> bool:
    return all(isinstance(atom, int) for atom in dim)


@dataclass(frozen=True)
class RepeatEach(Rule):
    """Every entry of one dimension repeated in place, such as a token for each of its experts."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x = layouts.get(node.args[0])
        if x is None or not is_token(x):
            return False
        times, dim = repeats(node, len(x))
        if not isinstance(times, int) or dim is None:
            return False
        own = x[dim]
        return _plain(own) or all(not isinstance(atom, int) for atom in own[:-1])

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        before, after = emitter.layouts[node.args[0]], emitter.layouts[node]
        times, dim = repeats(node, len(before))
        assert dim is not None
        place = packed_dim(after, dim)
        x = emitter.packed(node.args[0], entries)
        if vanishes(before[dim]):
            x = emitter.call(aten.unsqueeze.default, (x, place))
        return emitter.call(node.target, (x, times, place))


@dataclass(frozen=True)
class CastLike(Rule):
    """A cast to the dtype of another value, which need not have the same shape."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        return is_token(layouts.get(node.args[0])) and layouts[node.args[0]] == layouts[node]

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        return emitter.call(aten.to.dtype, (emitter.packed(node.args[0], entries), node.meta["val"].dtype))


@dataclass(frozen=True)
class Complex(Rule):
    """Pairs of numbers seen as complex numbers, or complex numbers seen as pairs, in the last dimension."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x, out = layouts.get(node.args[0]), layouts[node]
        pairs, numbers = (x, out) if node.target is aten.view_as_complex.default else (out, x)
        return is_token(x) and pairs is not None and numbers is not None and pairs == (*numbers, (2,))

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        x = emitter.packed(node.args[0], entries)
        return emitter.call(node.target, (emitter.call(aten.contiguous.default, (x,)),))


_POINTWISE = Pointwise()
# Elementwise operators that torch (2.11) does not tag as such.
_ELEMENTWISE = (
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default,
    aten.contiguous.default, aten.alias.default, aten.detach.default, aten.dropout.default, aten.leaky_relu.default,
    aten.hardswish.default, aten.log_sigmoid.default, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.masked_fill.Tensor, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
_ALONG_A_DIM = (
    aten.mean.dim, aten.sum.dim_IntList, aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction,
    aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
    aten.any.dim, aten.all.dim, aten.logsumexp.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim,
    aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
    aten.glu.default, aten.topk.default, aten.sort.default, aten.gather.default, aten.select.int, aten.split.Tensor,
    aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.narrow.default,
    aten.scatter.value, aten.scatter.src, aten.scatter_add.default,
)  # fmt: skip
_ONES = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
_TURNS = (aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _POINTWISE),
    **dict.fromkeys(_ALONG_A_DIM, AlongPlain()),
    **dict.fromkeys((aten.flip.default, aten.roll.default), AlongPlain("dims")),
    aten.linear.default: Linear(),
    aten.addmm.default: Linear(x=1, others=(0, 2)),
    aten.mm.default: Linear(others=(1,)),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), Norm()),
    aten.slice.Tensor: Slice(),
    **dict.fromkeys((aten.cat.default, aten.stack.default), Cat()),
    **dict.fromkeys((*VIEWS, *_ONES), Reshape()),
    **dict.fromkeys(_TURNS, Permute()),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default), Expand()),
    aten.repeat.default: Repeat(),
    aten.embedding.default: Embedding(),
    aten.index.Tensor: Lookup(),
    aten.repeat_interleave.self_int: RepeatEach(),
    aten.type_as.default: CastLike(),
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), Complex()),
    aten.bmm.default: PerTokenMatmul(),
}


_UNREDUCED_LOSSES = frozenset({
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.mse_loss.default,
    aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
})  # fmt: skip


def rule_for(node: fx.Node) -> Rule | None:
    """Return the rule of a node's operator, or None: then the value stays padded."""
    target = node.target
    if target in RULES:
        return RULES[target]
    if target is aten.matmul.default:
        other = node.args[1].meta["val"]  # type: ignore[union-attr]
        return Linear(others=(1,)) if other.dim() <= 2 else PerTokenMatmul()
    if getattr(target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
        return Item()
    if target in _UNREDUCED_LOSSES:
        return _POINTWISE if arguments_of(node)["reduction"] == 0 else None
    if isinstance(target, OpOverload) and not target._schema.is_mutable:
        random = torch.Tag.nondeterministic_seeded in target.tags
        if torch.Tag.pointwise in target.tags and not random:
            return _POINTWISE
    return None
