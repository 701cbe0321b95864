"""Emission of a packed graph: the one place where values are converted between padded and packed form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import deepytorch.passes.ops.pack
import deepytorch.passes.ops.varlen_attention  # noqa: F401  (both register their operators)
from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.layout import (
    ROWS,
    VIEWS,
    Atom,
    Layout,
    Positions,
    has_rows,
    is_token,
    packed_sizes,
    plain_size,
    positions_of,
    sorted_of,
    token_dims,
    vanishes,
)
from deepytorch.passes.unpad.masks import Meaning
from deepytorch.passes.unpad.program import IndexInput, IndexSet
from deepytorch.passes.unpad.region import Region
from deepytorch.passes.unpad.rules import Layouts, rule_for

aten = torch.ops.aten
ops = torch.ops.deepytorch


class Emitter:
    """Builds one graph from the nodes of a region's padded graph.

    entries: the nodes that get a packed form, and the entries that each form holds.
    """

    def __init__(self, region: Region, entries: Mapping[fx.Node, IndexSet]) -> None:
        self.graph = fx.Graph()
        self.layouts: Layouts = region.layouts
        self.entries = entries
        self.indices: list[IndexInput] = []
        self.inputs: list[fx.Node] = [node for node in region.graph.nodes if node.op == "placeholder"]
        packed = [attention for output, attention in region.seen.attentions.items() if output in entries]
        # the nodes that packed attentions replace
        self.swallowed = {node for each in packed for node in each.inner if node is not each.output}
        self._spaces, self._slicer, self._routed = region.spaces, region.slicer, region.seen.routed
        self._sizes = [space.size for space in region.spaces.values()]
        self._padded: dict[fx.Node, fx.Node] = {}
        self._packed: dict[tuple[fx.Node, IndexSet], fx.Node] = {}
        self._index_nodes: dict[IndexInput, fx.Node] = {}
        self._derived: dict[tuple[Any, ...], fx.Node] = {}
        for node in self.inputs:
            self._padded[node] = self.graph.node_copy(node)
        # Two temporary nodes mark places. New inputs go before the first one; values that follow from sizes and indices
        # alone go between the two. `finish` removes both.
        self._inputs_end = self.graph.call_function(operator.pos, (0,))
        self._header_end = self.graph.call_function(operator.pos, (0,))

    # ------------------------------------------------------------------ what rules use

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Add one call."""
        return self.graph.call_function(target, args, kwargs)

    def call_named(self, target: Any, arguments: dict[str, Any], form: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Add one call whose arguments are given by name; `form` maps the nodes among them."""
        args, kwargs = [], {}
        for argument in target._schema.arguments:
            value = fx.node.map_arg(arguments[argument.name], form)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.call(target, tuple(args), kwargs)

    def copied(self, arguments: Any) -> Any:
        """Return the arguments with every node in its padded form."""
        return fx.node.map_arg(arguments, self.padded)

    def count(self, entries: IndexSet) -> fx.Node:
        """Return the number of entries, as a size node."""
        flat = self.index(IndexInput("flat", entries))
        return self._once(("count", entries), lambda: self.call(aten.sym_size.int, (flat, 0)))

    def packed(self, node: Any, entries: IndexSet) -> fx.Node:
        """Return the packed form of a token value over `entries`."""
        if (node, entries) in self._packed:
            return self._packed[node, entries]
        home = self.entries.get(node)
        if home is None or (node, home) not in self._packed:
            if isinstance(node.meta.get("val"), (list, tuple)) or sorted_of(self.layouts.get(node)) is not None:
                raise AssertionError(f"{node} has no packed form, and cannot be gathered")
            return self._gathered(node, entries, positions_of(self.layouts[node])[0])
        if sorted_of(self.layouts.get(node)) is not None:
            raise AssertionError(f"{node.name} has no values for some of the entries asked for")
        whole = self._packed[node, home]
        made = self._after(whole, lambda: self.narrowed(whole, home, entries))
        if not self._slicer.is_written(node):
            self._packed[node, entries] = made
        return made

    def narrowed(self, packed: fx.Node, home: IndexSet, entries: IndexSet) -> fx.Node:
        """Return some of the entries of a packed value, which holds those of `home`."""
        if home == entries:
            return packed
        if not _contains(home, entries):
            raise AssertionError(f"{packed.name} has no values for some of the entries asked for")
        return self.call(ops.pack_rows.default, (packed, self.index(IndexInput("rank", entries, home))))

    def aligned(self, node: Any, out: Layout, entries: IndexSet) -> fx.Node:
        """Return the packed form of an operand that broadcasts against a value of layout `out`. Numbers stay."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return self.padded(node)
        layout = self.layouts[node]
        sizes = _aligned_sizes(layout, out)
        grid = positions_of(out)[0]
        if is_token(layout):
            bare = self._slicer.from_batch(node) and node not in self.entries
            x = self._gathered(node, entries, grid) if bare else self.packed(node, entries)
            return x if sizes == packed_sizes(layout) else self.call(aten.reshape.default, (x, [-1, *sizes]))
        held = token_dims(layout)
        if not held:
            x = self.padded(node)
            span = out[len(out) - len(layout) :]
            if not any(vanishes(dim) for dim in span):
                return x
            return self.call(aten.reshape.default, (x, sizes))
        index = self.rows(entries) if has_rows(layout) else self.columns(entries, grid.offset)
        key = (node, entries, 0 if has_rows(layout) else grid.offset, "gathered")
        source = self.padded(node)

        def gather() -> fx.Node:
            order = [held[0], *(dim for dim in range(len(layout)) if dim != held[0])]
            return self.call(aten.index_select.default, (self._permuted(source, order), 0, index))

        if self._slicer.is_written(node):  # gathered anew each time, behind what has been written by then
            return self.call(aten.reshape.default, (gather(), [-1, *sizes]))
        if key not in self._derived:
            self._derived[key] = self._after(source, gather)
        return self.call(aten.reshape.default, (self._derived[key], [-1, *sizes]))

    # ------------------------------------------------------------------ padded values

    def padded(self, node: fx.Node) -> fx.Node:
        """Return the padded form of a value: a copy of its computation, or its packed form scattered into zeros."""
        if node not in self._padded:
            home = self.entries.get(node)
            if home is None or (node, home) not in self._packed:
                raise AssertionError(f"{node.name} has not been written yet")
            packed = self._packed[node, home]
            self._padded[node] = self._after(packed, lambda: self._scattered(packed, self.layouts[node], home))
        return self._padded[node]

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node in its padded form."""
        self._padded[node] = self.graph.node_copy(node, self.padded)
        return self._padded[node]

    def provide(self, node: fx.Node, value: fx.Node, entries: IndexSet | None) -> None:
        """Declare that `value` of the new graph is `node`: packed over `entries`, or padded if `entries` is None."""
        if entries is None:
            self._padded[node] = value
        else:
            self._packed[node, entries] = value

    def pack(self, node: fx.Node) -> fx.Node:
        """Write a node in its packed form, by its rule."""
        rule = self._routed.get(node) or rule_for(node)
        assert rule is not None
        entries = self.entries[node]
        made = rule.emit(node, self, entries)
        self._keep_meta(node, made)
        self._packed[node, entries] = made
        return made

    def input(self, name: str) -> fx.Node:
        """Add a new input to the graph."""
        with self.graph.inserting_before(self._inputs_end):
            return self.graph.placeholder(name)

    def index(self, index: IndexInput) -> fx.Node:
        """Return an index input, which is added at its first use."""
        if index not in self._index_nodes:
            self._index_nodes[index] = self.input(f"{index.kind}_{len(self.indices)}")
            self.indices.append(index)
        return self._index_nodes[index]

    def rows(self, entries: IndexSet) -> fx.Node:
        """Return the row of every entry, (entries,)."""
        flat = self.index(IndexInput("flat", entries))
        _, positions = self.sizes(entries.space)
        return self._once(
            ("rows", entries), lambda: self.call(aten.div.Scalar_mode, (flat, positions), {"rounding_mode": "floor"})
        )

    def columns(self, entries: IndexSet, offset: int = 0) -> fx.Node:
        """Return the position of every entry, counted from `offset`, (entries,)."""
        flat = self.index(IndexInput("flat", entries))
        _, positions = self.sizes(entries.space)
        columns = self._once(("columns", entries), lambda: self.call(aten.remainder.Scalar, (flat, positions)))
        if offset:
            return self._once(("columns", entries, offset), lambda: self.call(aten.sub.Scalar, (columns, offset)))
        return columns

    def sizes(self, space: int) -> tuple[fx.Node, fx.Node]:
        """Return the numbers of rows and of positions of a token space."""
        source, rows, positions = self._sizes[space]
        tensor = self._padded[source]
        return (
            self._once(("size", tensor, rows), lambda: self.call(aten.sym_size.int, (tensor, rows))),
            self._once(("size", tensor, positions), lambda: self.call(aten.sym_size.int, (tensor, positions))),
        )

    def finish(self, outputs: Sequence[Any]) -> fx.Graph:
        """Add the outputs, remove dead code, and return the graph."""
        self.graph.output(tuple(outputs))
        self.graph.erase_node(self._inputs_end)
        self.graph.erase_node(self._header_end)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    # ------------------------------------------------------------------ attention

    def attention(self, attention: Attention, meaning: Meaning, queries: IndexSet, keys: IndexSet) -> fx.Node:
        """Write an attention over packed rows."""
        node = attention.output
        q = self._heads(attention.query, queries)
        key, value = self._grouped(attention)
        k, v = self._heads(key, keys), self._heads(value, keys)
        cu_q, cu_k = (self.index(IndexInput("cu_seqlens", entries)) for entries in (queries, keys))
        longest_q, longest_k = (self._longest(entries) for entries in (queries, keys))
        bias = self._bias(meaning.bias, attention, queries) if meaning.bias else None
        positions = (self.columns(queries), self.columns(keys)) if bias is not None else (None, None)
        seed = None
        if attention.dropout_p > 0:
            device = node.meta["val"].device
            seed = self.call(aten.randint.default, (2**62, []), {"dtype": torch.int64, "device": device})
        sinks = None
        if attention.sinks is not None:
            if is_token(self.layouts[attention.sinks]):
                heads = attention.sinks.meta["val"].shape[1]
                sinks = self.call(aten.reshape.default, (self.packed(attention.sinks, queries), [-1, heads]))
            else:
                sinks = self.call(aten.reshape.default, (self.padded(attention.sinks), [-1]))
        both = self.call(
            ops.varlen_attention.default,
            (q, k, v, cu_q, cu_k, longest_q, longest_k, bias, *positions, seed, sinks),
            {
                "scale": float(attention.scale),
                "window_left": meaning.window_left,
                "window_right": meaning.window_right,
                "dropout_p": attention.dropout_p,
                "softcap": attention.softcap,
            },
        )
        made = self.call(operator.getitem, (both, 0))
        made = self.call(aten.reshape.default, (made, [-1, *packed_sizes(self.layouts[node])]))
        self._keep_meta(node, both)
        self._packed[node, queries] = made
        return made

    def _heads(self, node: fx.Node, entries: IndexSet) -> fx.Node:
        """Return a packed value as (tokens, heads, head_dim)."""
        sizes = packed_sizes(self.layouts[node])
        x = self.packed(node, entries)
        return x if len(sizes) == 2 else self.call(aten.reshape.default, (x, [-1, math.prod(sizes[:-1]), sizes[-1]]))

    def _grouped(self, attention: Attention) -> tuple[fx.Node, fx.Node]:
        """Return keys and values before their heads were repeated for grouped queries.

        The packed operator groups heads itself.
        """
        key, value = (_before_repeat(node, self.layouts) for node in (attention.key, attention.value))
        if key in self.entries and value in self.entries and key is not None and value is not None:
            return key, value
        return attention.key, attention.value

    def _longest(self, entries: IndexSet) -> fx.Node:
        carrier = self.index(IndexInput("longest", entries))
        return self._once(("longest", entries), lambda: self.call(aten.sym_size.int, (carrier, 0)))

    def _bias(self, nodes: Sequence[fx.Node], attention: Attention, queries: IndexSet) -> fx.Node:
        """Return the sum of all terms that are added to the scores, with rows (or 1) and heads (or 1) in front."""
        total = self._term(nodes[0], attention, queries)
        for node in nodes[1:]:
            total = self.call(aten.add.Tensor, (total, self._term(node, attention, queries)))
        return total

    def _term(self, node: fx.Node, attention: Attention, queries: IndexSet) -> fx.Node:
        value, x = node.meta["val"], self.padded(node)
        if attention.is_merged(node) and value.dim() == 3 and value.shape[0] != 1:
            rows, _ = self.sizes(queries.space)
            return self.call(aten.unflatten.int, (x, 0, [rows, -1]))
        for _ in range(4 - value.dim()):
            x = self.call(aten.unsqueeze.default, (x, 0))
        return x

    # ------------------------------------------------------------------ gathers and scatters

    def grid(self, node: fx.Node) -> fx.Node:
        """Return a padded token value with one number per token, as (rows, positions)."""
        layout = self.layouts[node]
        x = self._by_token(self.padded(node), layout)
        return x if len(_atoms(layout)) == 2 else self.call(aten.reshape.default, (x, [*self._grid_sizes(layout)]))

    def _gathered(self, node: fx.Node, entries: IndexSet, grid: Positions) -> fx.Node:
        """Pack a padded token value whose own positions are those of `grid`."""
        key = ("gathered", node, entries, grid.offset, grid.cut)
        if key in self._derived:
            return self._derived[key]

        def gather() -> fx.Node:
            x = self._by_token(self._padded[node], self.layouts[node])
            x = self.call(aten.reshape.default, (x, [-1, *packed_sizes(self.layouts[node])]))
            return self.call(ops.pack_rows.default, (x, self._own_flat(entries, grid.offset, grid.cut)))

        if self._slicer.is_written(node):  # gathered anew each time, behind what has been written by then
            return gather()
        self._derived[key] = self._after(self._padded[node], gather)
        return self._derived[key]

    def _by_token(self, x: fx.Node, layout: Layout) -> fx.Node:
        """Move rows and positions to the front: (rows, positions, ...)."""
        rows, positions = self._grid_sizes(layout)
        atoms = _atoms(layout)
        if len(atoms) != len(layout):
            sizes = [rows if atom is ROWS else positions if isinstance(atom, Positions) else atom for atom in atoms]
            x = self.call(aten.reshape.default, (x, sizes))
        return self._permuted(x, _tokens_first(atoms))

    def _grid_sizes(self, layout: Layout) -> tuple[fx.Node, fx.Node]:
        """Return the numbers of rows and of positions of a token value."""
        grid = positions_of(layout)[0]
        rows, whole = self.sizes(self._spaces[grid.symbol].number)
        return rows, whole if grid.cut == 0 else self.call(operator.sub, (whole, grid.cut))

    def _permuted(self, x: fx.Node, order: list[int]) -> fx.Node:
        return x if order == sorted(order) else self.call(aten.permute.default, (x, order))

    def _scattered(self, packed: fx.Node, layout: Layout, entries: IndexSet) -> fx.Node:
        """Return a packed value in its padded layout, with zeros where it has no entry."""
        rows, positions = self._grid_sizes(layout)
        total = self.call(operator.mul, (rows, positions))
        grid, atoms = positions_of(layout)[0], _atoms(layout)
        flat = self._own_flat(entries, grid.offset, grid.cut)
        x = self.call(ops.unpack_rows.default, (packed, flat, total))
        plain = [atom for atom in atoms if isinstance(atom, int)]
        x = self.call(aten.reshape.default, (x, [rows, positions, *plain]))
        x = self._permuted(x, [_tokens_first(atoms).index(place) for place in range(len(atoms))])
        if len(atoms) != len(layout):
            x = self.call(aten.reshape.default, (x, [self._dim_size(dim, rows, positions) for dim in layout]))
        return x

    def _dim_size(self, dim: tuple[Any, ...], rows: fx.Node, positions: fx.Node) -> Any:
        size: Any = plain_size(dim)
        for atom in dim:
            if not isinstance(atom, int):
                factor = rows if atom is ROWS else positions
                size = factor if size == 1 else self.call(operator.mul, (size, factor))
        return size

    def _own_flat(self, entries: IndexSet, offset: int, cut: int) -> fx.Node:
        """Return row * (positions - cut) + position - offset of every entry, (entries,)."""
        flat = self.index(IndexInput("flat", entries))
        if offset == 0 and cut == 0:
            return flat

        def own() -> fx.Node:
            _, whole = self.sizes(entries.space)
            positions = self.call(operator.sub, (whole, cut))
            start = self.call(aten.mul.Scalar, (self.rows(entries), positions))
            return self.call(aten.add.Tensor, (start, self.columns(entries, offset)))

        return self._once(("own", entries, offset, cut), own)

    # ------------------------------------------------------------------ places in the new graph

    def _once(self, key: tuple[Any, ...], make: Callable[[], fx.Node]) -> fx.Node:
        """Make a value that depends on sizes and indices alone, once, at the head of the graph."""
        if key not in self._derived:
            with self.graph.inserting_before(self._header_end):
                self._derived[key] = make()
        return self._derived[key]

    def _after(self, place: fx.Node, make: Callable[[], fx.Node]) -> fx.Node:
        """Make a value right after `place`, so that it does not fall under a later `no_grad`."""
        before = self._header_end if place.op == "placeholder" else place.next
        with self.graph.inserting_before(before):
            return make()

    def _keep_meta(self, node: fx.Node, made: fx.Node) -> None:
        for name in ("recompute", "ac_graph_id", "stack_trace", "nn_module_stack", "custom"):
            if name in node.meta:
                made.meta[name] = node.meta[name]


def _atoms(layout: Layout) -> list[Atom]:
    """Return the atoms of all dimensions, with 1 for a dimension of size 1."""
    return [atom for dim in layout for atom in (dim or (1,))]


def _tokens_first(atoms: list[Atom]) -> list[int]:
    """Return the order of atoms with the rows first, then the positions, then the numbers."""
    first = atoms.index(ROWS)
    second = next(index for index, atom in enumerate(atoms) if isinstance(atom, Positions))
    return [first, second, *(index for index in range(len(atoms)) if index not in (first, second))]


def _contains(home: IndexSet, entries: IndexSet) -> bool:
    """Return whether every entry of one set is known to be in another."""
    if entries.loss is not None or home.loss is not None:
        return home == entries or home.loss is None
    ends_before = entries.cut - entries.offset >= home.cut - home.offset
    return home.space == entries.space and entries.offset >= home.offset and ends_before


def _aligned_sizes(layout: Layout, out: Layout) -> list[int]:
    """Return the sizes, after the tokens, with which an operand broadcasts against packed values.

    layout: that of the operand. out: that of the values.
    """
    shift = len(out) - len(layout)
    return [
        plain_size(layout[index - shift]) if index >= shift else 1 for index, dim in enumerate(out) if not vanishes(dim)
    ]


def _before_repeat(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> fx.Node | None:
    """Match `reshape(expand(unsqueeze(x)))`, which repeats every head of `x` in place; return `x`, or None."""
    while node.target in (aten.transpose.int, aten.permute.default):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in VIEWS or not isinstance(node.args[0], fx.Node):
        return None
    expanded = node.args[0]
    if expanded.target is not aten.expand.default:
        return None
    inner = expanded.args[0]
    while isinstance(inner, fx.Node) and inner.target is aten.slice.Tensor:
        inner = inner.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.unsqueeze.default:
        return None
    bare = inner.args[0]
    known = [layouts.get(value) for value in (node, expanded, inner, bare)]  # type: ignore[arg-type]
    if any(layout is None for layout in known):
        return None
    sizes = [packed_sizes(layout) for layout in known if layout is not None]
    if len(sizes[3]) != 2 or len(sizes[1]) != 3 or sizes[2] != [sizes[3][0], 1, sizes[3][1]]:
        return None
    repeated = [sizes[3][0] * sizes[1][1], sizes[3][1]]
    return bare if sizes[0] == repeated else None  # type: ignore[return-value]
