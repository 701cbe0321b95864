"""Routing: entries of tokens that are sorted by expert, run through grouped products, and put back.

A mixture of experts gives every token to a few experts. Its entries (token, expert) are sorted by expert, so that the
entries of an expert stand together for one product. Behind the product they are put back, or added up token by token.
The result at a token follows from that token alone, wherever its entries have stood in between, if

- the order only moves entries: `x[order // per_token]`, `x[order]`, `y[inverse]`, `index_add` by `order // per_token`;
- every operator between acts on each entry by itself, by the rules of `passes/unpad/rules.py`;
- the ends of the groups are counted from the sorted keys, and only tell a grouped product which entry meets which
  weights;
- the keys are numbers of groups, such as the indices that `topk` finds among as many scores.

If anything else reads a sort, it stays padded with all that it moved. Sorted entries have a layout of their own
(`Sorted`), so that no rule takes them for tokens in their places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from deepytorch.passes.graphs import arguments_of
from deepytorch.passes.unpad.layout import (
    ROWS,
    VIEWS,
    Dim,
    Layout,
    Places,
    Positions,
    Sorted,
    Symbols,
    is_places,
    is_token,
    packed_sizes,
    sorted_of,
    token_dims,
)
from deepytorch.passes.unpad.program import IndexSet
from deepytorch.passes.unpad.rules import AlongPlain, Layouts, Rule, rule_for
from deepytorch.torch_internals import OpOverload

if TYPE_CHECKING:
    from deepytorch.passes.unpad.emit import Emitter

aten = torch.ops.aten

_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
_GROUPED_PRODUCTS = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
_CASTS = frozenset({aten.to.dtype, aten._to_copy.default})
_SAME_VALUES = frozenset({*VIEWS, *_CASTS, aten.detach.default, aten.contiguous.default, aten.clone.default})
_EXACT = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})  # hold the number of every expert
_FIND_VALUES_AND_INDICES = frozenset({aten.topk.default, *_SORTS, aten.max.dim, aten.min.dim})
_FIND_INDICES = frozenset({aten.argmax.default, aten.argmin.default, *_ARGSORTS})
_READ_SIZES = frozenset({aten.sym_size.int, aten.empty_like.default})

Known = Mapping[Any, Layout]
Write = Callable[["Emitter", IndexSet], fx.Node]


@dataclass(frozen=True)
class Routed(Rule):
    """The rule of one node that moves entries, or that computes where entries stand.

    Attributes:
        layout: the layout of the node's value.
        reads: the inputs that have a packed form. Those in neither `reads` nor `whole` are replaced.
        write: adds the packed form to the emitter's graph.
        whole: the inputs that are read as they are.
        cost: the multiply-adds per token.
    """

    layout: Layout
    reads: tuple[fx.Node, ...]
    write: Write
    whole: tuple[fx.Node, ...] = ()
    cost: int = 0

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        """Return True: the rule was made for this node, from the layouts of its inputs."""
        return True

    def emit(self, node: fx.Node, emitter: Emitter, entries: IndexSet) -> fx.Node:
        """Add the packed form of the node."""
        return self.write(emitter, entries)


class Router:
    """The routings of one graph.

    Attributes:
        rules: the rule of every node that moves entries or computes where they stand.
        order_of: the sort of every node that holds, moves or puts back its entries.
    """

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self.rules: dict[fx.Node, Routed] = {}
        self.order_of: dict[fx.Node, fx.Node] = {}

    def layout(self, node: fx.Node, known: Known) -> Layout | None:
        """Return the layout of a value whose entries were moved; None if a node moves none."""
        rule = self._rule(node, known)
        if rule is None:
            return None
        self.rules[node] = rule
        return rule.layout

    def close(self, graph: fx.Graph, known: Known, from_batch: Mapping[fx.Node, bool]) -> set[fx.Node]:
        """Keep the sorts that only move entries, and return the nodes of all others.

        Everything that is computed from the order of a sort that is kept acts on each entry by itself, and ends in one
        node, which puts the entries back.
        """
        inside: dict[Any, set[fx.Node]] = {}
        exits: dict[Any, set[fx.Node]] = {}
        for node in graph.nodes:
            held = sorted_of(known.get(node))
            if held is not None:
                inside.setdefault(held.order, set()).add(node)
            elif node in self.rules and node.target not in _SORTS:
                moved = next(filter(None, (sorted_of(known.get(source)) for source in self.rules[node].reads)))
                exits.setdefault(moved.order, set()).add(node)
        broken: set[fx.Node] = set()
        for order, members in inside.items():
            nodes = {order, *members, *exits.get(order, ())}
            one_exit = len(exits.get(order, ())) == 1
            if one_exit and all(_only_moves(node, nodes, self.rules, known, from_batch) for node in members):
                self.order_of.update(dict.fromkeys(nodes, order))
            else:
                broken |= nodes
                for node in nodes & self.rules.keys():
                    del self.rules[node]
        return broken

    def _rule(self, node: fx.Node, known: Known) -> Routed | None:
        target = node.target
        if target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in _SORTS:
            return self._sort_result(node, known)
        if target in _ARGSORTS:
            return _order(node, known, _sort_packed(node))
        if not any(sorted_of(known.get(source)) is not None for source in node.all_input_nodes):
            return None
        if target in (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.Scalar):
            return _divided(node, known)
        if target in (aten.index.Tensor, aten.index_select.default):
            return _moved(node, known)
        if target is aten.index_put.default:
            return self._inverse(node, known)
        if target is aten.index_add.default:
            return _added_up(node, known)
        if target is aten.histc.default:
            return _counts(node, known)
        if target is aten.cumsum.default or target in _CASTS:
            return _counted(node, known)
        if isinstance(target, OpOverload) and target._schema.name in _GROUPED_PRODUCTS:
            return _grouped_product(node, known)
        return None

    def _sort_result(self, node: fx.Node, known: Known) -> Routed | None:
        """Return the rule of the sorted keys, or of the order, and keep the rule of the sort itself."""
        sort: Any = node.args[0]

        def item(emitter: Emitter, entries: IndexSet) -> fx.Node:
            return emitter.call(operator.getitem, (emitter.packed(sort, entries), node.args[1]))

        if node.args[1] == 1:
            rule = _order(sort, known, item)
        else:
            held = _entries_of(sort, known)
            rule = None if held is None else Routed(((ROWS, held),), (sort,), item)
        if rule is not None:
            self.rules[sort] = Routed((), (sort.args[0],), _sort_packed(sort))
            rule = Routed(rule.layout, (sort,), item)
        return rule

    def _inverse(self, node: fx.Node, known: Known) -> Routed | None:
        """Return the rule of `empty.index_put([order], arange(entries))`: each entry's place behind the sort."""
        base, indices, values = node.args[:3]
        accumulates = arguments_of(node)["accumulate"]
        order = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
        held = _places(order, known, "entries", 1)
        if held is None or accumulates or not isinstance(values, fx.Node) or not isinstance(base, fx.Node):
            return None
        entries = self._symbols.rows * held.size
        sizes = [self._symbols.expr(size) for each in (base, values) for size in each.meta["val"].shape]
        if len(sizes) != 2 or any((size - entries).expand() != 0 for size in sizes) or not _counts_from_zero(values):
            return None
        dtype, device = node.meta["val"].dtype, node.meta["val"].device

        def write(emitter: Emitter, to: IndexSet) -> fx.Node:
            places = emitter.packed(order, to)
            count = emitter.call(aten.sym_size.int, (places, 0))
            numbers = emitter.call(aten.arange.default, (count,), {"dtype": dtype, "device": device})
            return emitter.call(
                aten.index_put.default, (emitter.call(aten.empty_like.default, (numbers,)), [places], numbers)
            )

        return Routed(((Places(held, "inverse"),),), (order,), write)  # type: ignore[arg-type]


def _only_moves(
    node: fx.Node,
    nodes: set[fx.Node],
    rules: Mapping[fx.Node, Routed],
    known: Known,
    from_batch: Mapping[fx.Node, bool],
) -> bool:
    """Return whether a node acts on each entry by itself, and is read by `nodes` only."""
    if node not in rules:
        rule = rule_for(node)
        if rule is None or not is_token(known[node]) or not rule.admits(node, known, from_batch):
            return False
    for user in node.users:
        if user in nodes:
            continue
        if user.target in _READ_SIZES:  # such as `empty_like(order)`, which the inverse is written into
            if any(
                reader not in rules or user in (*rules[reader].reads, *rules[reader].whole) for reader in user.users
            ):
                return False
        else:  # an operator with several results, such as `chunk`
            several = rule_for(user)
            if not isinstance(several, AlongPlain) or not several.admits(user, known, from_batch):
                return False
            if not isinstance(user.meta.get("val"), (list, tuple)) or not set(user.users) <= nodes:
                return False
    return True


# ---------------------------------------------------------------------- rules of single operators


def _entries_of(sort: fx.Node, known: Known) -> Sorted | None:
    """Return the entries that a sort moves: those of a value of one dimension, (rows * positions * per_token,)."""
    layout = known.get(sort.args[0])
    if layout is None or not is_token(layout) or len(layout) != 1 or sorted_of(layout) is not None:
        return None
    rows, positions, *rest = (*layout[0], 1)
    if rows is not ROWS or not isinstance(positions, Positions) or not all(isinstance(each, int) for each in rest):
        return None
    return Sorted(positions.symbol, positions.offset, positions.cut, order=sort, per_token=rest[0])  # type: ignore[arg-type]


def _sort_packed(sort: fx.Node) -> Write:
    """Return what writes a sort of packed keys, or of packed places."""

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        keys = emitter.call(aten.reshape.default, (emitter.packed(sort.args[0], entries), [-1]))
        return emitter.call(sort.target, (keys, *sort.args[1:]), dict(sort.kwargs))

    return write


def _order(sort: fx.Node, known: Known, write: Write) -> Routed | None:
    """Return the rule of the order of a sort. Sorting an order gives its inverse."""
    source: Any = sort.args[0]
    turned = _places(source, known, "entries", 1)
    if turned is not None and not arguments_of(sort)["descending"]:
        return Routed(((Places(turned, "inverse"),),), (source,), write)
    held = _entries_of(sort, known)
    return None if held is None else Routed(((Places(held, "entries"),),), (source,), write)


def _places(node: Any, known: Known, kind: str, divisor: int) -> Sorted | None:
    """Return the entries whose places a value tells, if it tells them in this way."""
    layout = known.get(node) if isinstance(node, fx.Node) else None
    found = layout[0][0] if layout is not None and is_places(layout) else None
    right = isinstance(found, Places) and (found.kind, found.divisor) == (kind, divisor)
    return found.of if right else None  # type: ignore[union-attr]


def _before(held: Sorted, divisor: int) -> Dim:
    """Return the dimension that entries come from: entries if `divisor` is 1, or tokens."""
    tokens: Dim = (ROWS, Positions(held.symbol, held.offset, held.cut))
    return tokens if held.per_token == divisor else (*tokens, held.per_token)


def _divided(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `order // per_token`: the number of each entry's token."""
    order: Any = node.args[0]
    held = _places(order, known, "entries", 1)
    floors = node.kwargs.get("rounding_mode", "floor") == "floor"
    if held is None or node.args[1] != held.per_token or not floors:
        return None

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        return emitter.call(node.target, (emitter.packed(order, entries), *node.args[1:]), dict(node.kwargs))

    return Routed(((Places(held, "entries", held.per_token),),), (order,), write)


def _moved(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `x[order // per_token]` and `x[order]`, which sort entries, or of `y[inverse]`."""
    x: Any = node.args[0]
    if node.target is aten.index_select.default:
        index: Any = node.args[2] if node.args[1] == 0 else None
    else:
        index = node.args[1][0] if len(node.args[1]) == 1 else None  # type: ignore[arg-type, index]
    layout = known.get(x)
    told = known.get(index) if isinstance(index, fx.Node) else None
    if layout is None or not is_token(layout) or told is None or not is_places(told):
        return None
    places: Any = told[0][0]
    held = places.of
    if any(not isinstance(atom, int) for dim in layout[1:] for atom in dim):
        return None
    if places.kind == "entries" and layout[0] == _before(held, places.divisor):
        found: Layout = ((ROWS, held), *layout[1:])
    elif places.kind == "inverse" and layout[0] == (ROWS, held):
        found = (_before(held, 1), *layout[1:])
    else:
        return None

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        rest = packed_sizes(layout[1:])
        rows = emitter.call(aten.reshape.default, (emitter.packed(x, entries), [-1, *rest]))
        rows = emitter.call(aten.index.Tensor, (rows, [emitter.packed(index, entries)]))
        return emitter.call(aten.reshape.default, (rows, [-1, *packed_sizes(found)]))

    return Routed(found, (x, index), write)


def _added_up(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `tokens.index_add(0, order // per_token, y)`, which adds each entry to its token."""
    base, dim, index, source = node.args[:4]
    layout, moved = known.get(base), known.get(source)
    told = known.get(index)
    if dim != 0 or layout is None or moved is None or told is None or not is_places(told):
        return None
    places: Any = told[0][0]
    held = places.of
    if places.kind != "entries" or places.divisor != held.per_token:
        return None
    if layout[0] != _before(held, held.per_token) or moved != ((ROWS, held), *layout[1:]):
        return None
    if any(not isinstance(atom, int) for each in layout[1:] for atom in each):
        return None

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        packed = [emitter.packed(each, entries) for each in (base, index, source)]
        return emitter.call(aten.index_add.default, (packed[0], 0, *packed[1:]), dict(node.kwargs))

    return Routed(layout, (base, index, source), write)  # type: ignore[arg-type]


def _counts(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `histc(keys, bins=groups, min=0, max=groups - 1)`: the number of entries of each group."""
    keys: Any = node.args[0]
    given = arguments_of(node)
    groups, low, high = given["bins"], given["min"], given["max"]
    sort, held = _sort_whose_keys(keys), sorted_of(known.get(keys))
    if sort is None or held is None or held.order != sort:
        return None
    if not _numbers_groups(sort.args[0], groups):
        return None
    # bins as wide as the distance of two keys, or a little less, so that each key has a bin of its own; a single bin
    # from 0 to 0 reaches as far as the keys
    if low != 0 or high not in (groups - 1, groups) or arguments_of(sort)["descending"]:
        return None

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        return emitter.call(node.target, (emitter.packed(keys, entries), *node.args[1:]), dict(node.kwargs))

    return Routed(((Places(held, "counts", groups),),), (keys,), write)


def _sort_whose_keys(node: Any) -> fx.Node | None:
    """Return the sort whose sorted keys a value is, after casts that keep every key."""
    while isinstance(node, fx.Node) and node.target in _CASTS and node.meta["val"].dtype in _EXACT:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != 0:
        return None
    sort: Any = node.args[0]
    return sort if sort.target in _SORTS else None


def _numbers_groups(keys: Any, groups: int) -> bool:
    """Return whether keys are whole numbers from 0 to `groups` - 1: indices found along so long a dimension."""
    while isinstance(keys, fx.Node) and keys.target in _SAME_VALUES and keys.meta["val"].dtype in _EXACT:
        keys = keys.args[0]
    if not isinstance(keys, fx.Node):
        return False
    found: Any = keys.args[0] if keys.target is operator.getitem and keys.args[1] == 1 else keys
    if found.target not in (_FIND_VALUES_AND_INDICES if found is not keys else _FIND_INDICES):
        return False
    dim = arguments_of(found)["dim"]
    size = found.args[0].meta["val"].shape[dim] if isinstance(dim, int) else None
    return isinstance(size, int) and size <= groups


def _counted(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `cumsum(counts, 0)`, where each group ends, and of casts of places that keep them."""
    source: Any = node.args[0]
    layout = known.get(source)
    if layout is None or not is_places(layout) or node.meta["val"].dtype not in _EXACT:
        return None
    places: Any = layout[0][0]
    kind = places.kind
    if node.target is aten.cumsum.default:
        if kind != "counts":
            return None
        kind = "ends"

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        return emitter.call(node.target, (emitter.packed(source, entries), *node.args[1:]), dict(node.kwargs))

    return Routed(((Places(places.of, kind, places.divisor),),), (source,), write)


def _grouped_product(node: fx.Node, known: Known) -> Routed | None:
    """Return the rule of `grouped_mm(y, weights, ends)`: the product of each entry with the weights of its group."""
    given = arguments_of(node)
    x, weights, ends, *rest = given.values()
    layout = known.get(x)
    held = sorted_of(layout)
    plain = known.get(weights)
    if layout is None or held is None or len(layout) != 2 or layout[0] != (ROWS, held) or plain is None:
        return None
    if token_dims(plain) or len(plain) != 3 or any(isinstance(each, fx.Node) for each in rest):
        return None
    groups, inner, outer = weights.meta["val"].shape
    if not isinstance(groups, int) or _places(ends, known, "ends", groups) != held:
        return None

    def write(emitter: Emitter, entries: IndexSet) -> fx.Node:
        packed = {x: emitter.packed(x, entries), ends: emitter.packed(ends, entries), weights: emitter.padded(weights)}
        return emitter.call(
            node.target, fx.map_arg(node.args, packed.__getitem__), fx.map_arg(node.kwargs, packed.__getitem__)
        )

    return Routed(((ROWS, held), (outer,)), (x, ends), write, (weights,), held.per_token * inner * outer)


def _counts_from_zero(node: fx.Node) -> bool:
    """Return whether a value is 0, 1, 2, ..."""
    if node.target is aten.arange.default:
        return True
    if node.target is aten.arange.start:
        return node.args[0] == 0
    return node.target is aten.arange.start_step and node.args[0] == 0 and (len(node.args) < 3 or node.args[2] == 1)
