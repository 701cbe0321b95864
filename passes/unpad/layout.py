"""Layouts: which dimensions of a value are rows and which are positions.

A layout has one entry per dimension, each a tuple of atoms whose sizes multiply to the dimension's size: `ROWS`, a
`Positions` of some token space, or a plain number. `(rows, positions, 512)` has the layout `((ROWS,), (Positions,),
(512,))`; merged, `(rows * positions, 512)` has `((ROWS, Positions), (512,))`. A dimension of size 1 is `()`.

Sizes are symbols, so the expression of a dimension's size identifies the dimension. Only merged dimensions need their
history, for the order of their atoms. A layout does not say whether an operator mixes positions: the rules in
`passes/unpad/rules.py` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

aten = torch.ops.aten


class _Rows:
    def __repr__(self) -> str:
        return "ROWS"


ROWS = _Rows()


@dataclass(frozen=True)
class Positions:
    """Positions `offset` to `offset + size` of a token space, where size = `symbol` - `cut`."""

    symbol: sympy.Symbol
    offset: int = 0
    cut: int = 0

    @property
    def size(self) -> sympy.Expr:
        """Return the number of positions: an expression in `symbol`."""
        return self.symbol - self.cut

    @property
    def whole(self) -> bool:
        """Return whether these are all positions of the space."""
        return self.offset == 0 and self.cut == 0


@dataclass(frozen=True)
class Sorted(Positions):
    """The entries of all tokens, in the order in which the operator `order` sorted them.

    A token has `per_token` entries, such as the experts that it is routed to. With the rows, these positions are one
    dimension, `(ROWS, Sorted(...))`, which is not split: the entries of a row do not stand together.
    """

    order: fx.Node | None = None
    per_token: int = 1

    @property
    def size(self) -> sympy.Expr:
        """Return the number of entries of one row."""
        return (self.symbol - self.cut) * self.per_token

    @property
    def whole(self) -> bool:
        """Return False: no position can be told from an entry's place."""
        return False


@dataclass(frozen=True)
class Places:
    """One dimension of numbers that say where the entries of a sort stand, and mean nothing else.

    kind is one of:

    - "entries": at each place of the sorted order, the entry's number before the sort, divided by `divisor`;
    - "inverse": for each entry before the sort, its place in the sorted order;
    - "counts": for each group of equal keys, its number of entries;
    - "ends": for each group of equal keys, the place at which it ends in the sorted order.
    """

    of: Sorted
    kind: str
    divisor: int = 1


Atom = _Rows | Positions | Places | int
Dim = tuple[Atom, ...]
Layout = tuple[Dim, ...]

VIEWS = frozenset({
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.reshape_as.default,
    aten.view_as.default,
})  # fmt: skip


def expression(size: int | torch.SymInt, shape_env: Any) -> sympy.Expr:
    """Return the size as an expression in canonical symbols."""
    if isinstance(size, torch.SymInt):
        return sympy.expand(shape_env.replace(size.node.expr))
    return sympy.Integer(size)


@dataclass(frozen=True)
class Symbols:
    """The meaning of a region's sizes.

    `rows` counts rows, and each of `positions` counts the positions of a token space.
    """

    rows: sympy.Symbol
    positions: frozenset[sympy.Symbol]
    shape_env: Any

    def expr(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return the size as an expression in canonical symbols."""
        return expression(size, self.shape_env)

    def atom_size(self, atom: Atom) -> sympy.Expr:
        """Return the number of elements that an atom stands for."""
        if atom is ROWS:
            return self.rows
        return atom.size if isinstance(atom, Positions) else sympy.Integer(atom)

    def pure(self, size: sympy.Expr) -> Dim | None:
        """Return the atoms of a dimension that is one thing only, or None if the dimension is merged or unknown."""
        if size.is_Integer:
            return () if size == 1 else (int(size),)
        if size == self.rows:
            return (ROWS,)
        for symbol in self.positions:
            cut = symbol - size
            if cut.is_Integer:
                return (Positions(symbol, 0, int(cut)),)
        return None


def layouts(
    graph: fx.Graph,
    symbols: Symbols,
    from_batch: Callable[[fx.Node], bool],
    routed: Callable[[fx.Node, Mapping[fx.Node, Layout]], Layout | None] = lambda node, known: None,
) -> dict[fx.Node, Layout]:
    """Return the layout of every tensor of `graph` for which one is known.

    routed: returns the layout of a value whose entries an operator has moved, from the layouts of earlier values; None
    for all other values.

    The start of positions matters only for values that the model computes. A value that follows from the batch alone
    (shifted labels, masks) is gathered by its own index: its offset is 0, and no other value takes its offset from it.
    """
    known: dict[fx.Node, Layout] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            layout = None if from_batch(node) else routed(node, known)
            if layout is None:
                layout = _layout(node, [symbols.expr(size) for size in value.shape], symbols, known, from_batch)
            if layout is not None:
                known[node] = _from_start(layout) if from_batch(node) else layout
    return known


def _from_start(layout: Layout) -> Layout:
    return tuple(
        tuple(replace(atom, offset=0) if isinstance(atom, Positions) else atom for atom in dim) for dim in layout
    )


def _layout(
    node: fx.Node,
    shape: list[sympy.Expr],
    symbols: Symbols,
    known: dict[fx.Node, Layout],
    from_batch: Callable[[fx.Node], bool],
) -> Layout | None:
    sources = [source for source in tensor_operands(node) if source in known and not is_places(known[source])]
    operands = [known[source] for source in sorted(sources, key=from_batch)]  # the model's values come first
    if node.target in VIEWS:
        viewed = known.get(node.args[0])  # the second argument of `view_as` only has a shape
        return None if viewed is None or is_places(viewed) else resplit(viewed, shape, symbols)
    if node.target is aten.slice.Tensor and operands:
        return _sliced(node, operands[0], shape, symbols)
    if node.target is aten.repeat_interleave.self_int and operands:
        return _repeated(operands[0], *repeats(node, len(operands[0])))
    dims = []
    for index, size in enumerate(shape):
        dim = _carried(size, index, len(shape), operands, symbols)
        dim = symbols.pure(size) if dim is None else dim
        if dim is None:
            return None
        dims.append(dim)
    return tuple(dims)


def _carried(size: sympy.Expr, index: int, ndim: int, operands: list[Layout], symbols: Symbols) -> Dim | None:
    """Return a dimension that an operand already has, at the same place from the right or, if merged, at any place."""
    if size.is_Integer:
        return None
    for operand in operands:
        place = len(operand) - (ndim - index)
        if 0 <= place < len(operand) and _dim_size(operand[place], symbols) == size:
            return operand[place]
    for operand in operands:
        for dim in operand:
            if _dim_size(dim, symbols) == size:
                return dim
    return None


def _dim_size(dim: Dim, symbols: Symbols) -> sympy.Expr:
    size = sympy.Integer(1)
    for atom in dim:
        size = sympy.expand(size * symbols.atom_size(atom))
    return size


def tensor_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that a node reads, in order.

    The operands of a multi-output operator stand for the result of its `getitem`.
    """
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.Tensor):
            yield source
        elif isinstance(source.meta.get("val"), (list, tuple)):
            yield from tensor_operands(source)


def resplit(layout: Layout, shape: Sequence[sympy.Expr], symbols: Symbols) -> Layout | None:
    """Return the layout after a view to `shape`. Atoms keep their order; numbers split and merge; symbols do not."""
    atoms = [atom for dim in layout for atom in dim]
    result: list[Dim] = []
    for size in shape:
        dim: list[Atom] = []
        reached = sympy.Integer(1)
        while reached != size:
            if not atoms:
                return None
            atom = atoms.pop(0)
            if isinstance(atom, Sorted) and dim != [ROWS]:
                return None
            rest = sympy.cancel(size / reached)
            if isinstance(atom, int):
                if not rest.is_Integer:  # a symbol follows later in this dimension: take the whole number
                    if sympy.cancel(rest / atom).as_numer_denom()[1] != 1:
                        return None
                elif int(rest) % atom and atom % int(rest):
                    return None
                elif atom > int(rest):
                    atoms.insert(0, atom // int(rest))
                    atom = int(rest)
            if isinstance(atom, int) and dim and isinstance(dim[-1], int):
                dim[-1] *= atom
            else:
                dim.append(atom)
            reached = sympy.expand(reached * symbols.atom_size(atom))
            if len(dim) > 8:
                return None
        if dim == [ROWS] and atoms and isinstance(atoms[0], Sorted):
            return None
        result.append(tuple(dim))
    return tuple(result) if not atoms else None


def repeats(node: fx.Node, ndim: int) -> tuple[Any, int | None]:
    """Return how often a `repeat_interleave` repeats, and along which dimension; None if along all at once."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None:
        return node.args[1], 0 if ndim == 1 else None
    return node.args[1], dim % ndim  # type: ignore[operator]


def _repeated(layout: Layout, times: Any, dim: int | None) -> Layout | None:
    """Return the layout after every entry of dimension `dim` was repeated in place."""
    if not isinstance(times, int) or dim is None or sorted_of(layout) is not None:
        return None
    *before, last = (1, *layout[dim])
    repeated = (*before[1:], last * times) if isinstance(last, int) else (*layout[dim], times)
    return (*layout[:dim], repeated, *layout[dim + 1 :])


def _sliced(node: fx.Node, layout: Layout, shape: list[sympy.Expr], symbols: Symbols) -> Layout | None:
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(layout)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = node.args[4] if len(node.args) > 4 else 1
    if _dim_size(layout[dim], symbols) == shape[dim]:
        return layout
    old = layout[dim]
    if len(old) == 1 and isinstance(old[0], Positions):
        cut = old[0].symbol - shape[dim]
        if not (isinstance(start, int) and start >= 0 and step == 1 and cut.is_Integer):
            return None
        new: Dim = (Positions(old[0].symbol, old[0].offset + start, int(cut)),)
    else:
        pure = symbols.pure(shape[dim])
        if pure is None:
            return None
        new = pure
    return (*layout[:dim], new, *layout[dim + 1 :])


def positions_of(layout: Layout) -> list[Positions]:
    """Return every positions atom of a layout."""
    return [atom for dim in layout for atom in dim if isinstance(atom, Positions)]


def has_rows(layout: Layout) -> bool:
    """Return whether some dimension counts rows."""
    return any(atom is ROWS for dim in layout for atom in dim)


def is_places(layout: Layout | None) -> bool:
    """Return whether a value says where the entries of a sort stand."""
    return layout is not None and any(isinstance(atom, Places) for dim in layout for atom in dim)


def sorted_of(layout: Layout | None) -> Sorted | None:
    """Return the sorted entries that a value holds or tells the places of; None for any other value."""
    for atom in (atom for dim in layout or () for atom in dim):
        if isinstance(atom, Sorted):
            return atom
        if isinstance(atom, Places):
            return atom.of
    return None


def is_token(layout: Layout | None) -> bool:
    """Return whether a value has one entry per token.

    The dimensions of such a value are rows once, positions of one space once, and otherwise only numbers.
    """
    if layout is None:
        return False
    rows = sum(atom is ROWS for dim in layout for atom in dim)
    positions = positions_of(layout)
    return rows == 1 and len(positions) == 1 and 0 <= positions[0].offset <= positions[0].cut


def leads_with_tokens(layout: Layout | None) -> bool:
    """Return whether a value is (rows, positions, ...) or (rows * positions, ...), with plain dimensions after that."""
    if layout is None or not is_token(layout) or sorted_of(layout) is not None:
        return False
    if len(layout[0]) == 2:
        first: Dim = layout[0]
        rest = layout[1:]
    else:
        first, rest = (*layout[0], *(layout[1] if len(layout) > 1 else ())), layout[2:]
        if any(len(dim) != 1 for dim in layout[:2]):
            return False
    ordered = len(first) == 2 and first[0] is ROWS and isinstance(first[1], Positions)
    return ordered and all(isinstance(atom, int) for dim in rest for atom in dim)


def token_dims(layout: Layout) -> list[int]:
    """Return the dimensions that hold the rows or the positions, in order."""
    return [index for index, dim in enumerate(layout) if any(not isinstance(atom, int) for atom in dim)]


def plain_size(dim: Dim) -> int:
    """Return the product of the numbers in a dimension."""
    return math.prod(atom for atom in dim if isinstance(atom, int))


def vanishes(dim: Dim) -> bool:
    """Return whether the packed value lacks a dimension: one that is rows, positions or both, and nothing else."""
    return bool(dim) and all(not isinstance(atom, int) for atom in dim)


def packed_sizes(layout: Layout) -> list[int]:
    """Return the packed value's sizes after its first dimension, the tokens."""
    return [plain_size(dim) for dim in layout if not vanishes(dim)]


def packed_dim(layout: Layout, dim: int) -> int | None:
    """Return the place of dimension `dim` of the padded value in the packed value, or None if `dim` vanishes."""
    if vanishes(layout[dim]):
        return None
    return 1 + sum(not vanishes(layout[index]) for index in range(dim))
