"""Which dimension is rows and which is positions, on graphs of a node or two."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch

from deepytorch.passes.unpad.layout import (
    ROWS,
    Layout,
    Positions,
    Symbols,
    is_token,
    leads_with_tokens,
    packed_dim,
    packed_sizes,
    resplit,
    token_dims,
    vanishes,
)
from tests.passes.padded_graph import PaddedGraph

aten = torch.ops.aten
END = torch.iinfo(torch.int64).max

R, P, Q = sympy.symbols("r p q", integer=True, positive=True)
SYMBOLS = Symbols(R, frozenset({P, Q}), None)
HERE = Positions(P)
TOKENS: Layout = ((ROWS,), (HERE,), (8,))


def test_sizes_are_read_by_symbol() -> None:
    assert SYMBOLS.pure(R) == (ROWS,)
    assert SYMBOLS.pure(P) == (HERE,)
    assert SYMBOLS.pure(Q) == (Positions(Q),)
    assert SYMBOLS.pure(P - 1) == (Positions(P, 0, 1),)
    assert SYMBOLS.pure(sympy.Integer(1)) == ()
    assert SYMBOLS.pure(sympy.Integer(7)) == (7,)
    for foreign in (R * P, 2 * P, R - 1, P + Q, sympy.floor(P / 2)):
        assert SYMBOLS.pure(foreign) is None


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (TOKENS, [R * P, 8], ((ROWS, HERE), (8,))),
        (TOKENS, [R, P, 2, 4], ((ROWS,), (HERE,), (2,), (4,))),
        (TOKENS, [R, 1, P, 8], ((ROWS,), (), (HERE,), (8,))),
        (TOKENS, [R, 8 * P], ((ROWS,), (HERE, 8))),
        (TOKENS, [8 * P * R], ((ROWS, HERE, 8),)),
        (TOKENS, [P, R, 8], None),
        (TOKENS, [R, 8, P], None),
        (TOKENS, [P * R, 2, 4], ((ROWS, HERE), (2,), (4,))),
        (TOKENS, [R, 2 * P, 4], ((ROWS,), (HERE, 2), (4,))),
        (((ROWS,), (2,), (HERE,), (4,)), [2 * R, P, 4], ((ROWS, 2), (HERE,), (4,))),
        (((ROWS, HERE), (8,)), [R, P, 8], TOKENS),
        (((ROWS, HERE), (8,)), [P, R, 8], None),
        (((HERE, ROWS), (8,)), [P, R, 8], ((HERE,), (ROWS,), (8,))),
        (((HERE, ROWS), (8,)), [R, P, 8], None),
        (((ROWS,), (HERE,), (6,)), [R, P, 4, 2], None),
        (((ROWS,), (HERE,), (2,), (3,)), [R, P, 6], ((ROWS,), (HERE,), (6,))),
        (((ROWS,), (Positions(P, 1, 1),), (8,)), [R * P - R, 8], ((ROWS, Positions(P, 1, 1)), (8,))),
        (((ROWS,), (Positions(P, 1, 1),), (8,)), [R, P, 8], None),
        (TOKENS, [R, P], None),
        (TOKENS, [R, P, 8, 2], None),
    ],
)
def test_views_keep_atoms_in_order(layout: Layout, shape: list[Any], expected: Layout | None) -> None:
    assert resplit(layout, [sympy.expand(size) for size in shape], SYMBOLS) == expected


@pytest.mark.parametrize(
    ("layout", "token", "leads"),
    [
        (TOKENS, True, True),
        (((ROWS, HERE), (8,)), True, True),
        (((ROWS, HERE),), True, True),
        (((ROWS,), (HERE,)), True, True),
        (((HERE,), (ROWS,), (8,)), True, False),
        (((HERE, ROWS), (8,)), True, False),
        (((ROWS,), (2,), (HERE,), (4,)), True, False),
        (((ROWS,), (HERE, 2)), True, False),
        (((ROWS, HERE, 2), (4,)), True, False),
        (((), (ROWS,), (HERE,)), True, False),
        (((ROWS,), (Positions(P, 1, 2),)), True, True),
        (((ROWS,), (Positions(P, 2, 1),)), False, False),
        (((ROWS,), (Positions(P, -1, 1),)), False, False),
        (((ROWS,), (HERE,), (HERE,)), False, False),
        (((ROWS,), (HERE,), (Positions(Q),)), False, False),
        (((ROWS,), (ROWS,), (HERE,)), False, False),
        (((ROWS,), (8,)), False, False),
        (((HERE,), (8,)), False, False),
        (None, False, False),
    ],
)
def test_one_entry_a_token(layout: Layout | None, token: bool, leads: bool) -> None:
    assert is_token(layout) is token
    assert leads_with_tokens(layout) is leads


@pytest.mark.parametrize(
    ("layout", "sizes", "dims"),
    [
        (TOKENS, [8], [None, None, 1]),
        (((ROWS, HERE), (8,)), [8], [None, 1]),
        (((ROWS,), (2,), (HERE,), (4,)), [2, 4], [None, 1, None, 2]),
        (((ROWS,), (), (HERE,), (4,)), [1, 4], [None, 1, None, 2]),
        (((ROWS,), (HERE, 8)), [8], [None, 1]),
        (((ROWS, HERE, 2), (4,)), [2, 4], [1, 2]),
        (((3,), (HERE,), (ROWS,)), [3], [1, None, None]),
    ],
)
def test_packed_sizes_and_dimensions(layout: Layout, sizes: list[int], dims: list[int | None]) -> None:
    assert packed_sizes(layout) == sizes
    assert [packed_dim(layout, dim) for dim in range(len(layout))] == dims
    assert [vanishes(dim) for dim in layout] == [dim is None for dim in dims]


def test_token_dimensions() -> None:
    assert token_dims(((3,), (ROWS,), (), (HERE, 2))) == [1, 3]


# ------------------------------------------------------------------------------------------------ on graphs


def positions(g: PaddedGraph, node: Any) -> tuple[int, int] | None:
    """Where the positions of (rows, positions, ...) start, and how many are missing; None without a layout."""
    g.output(node)
    layout = g.layouts().get(node)
    if layout is None or not is_token(layout):
        return None
    [grid] = [atom for dim in layout for atom in dim if isinstance(atom, Positions)]
    return grid.offset, grid.cut


def cut(g: PaddedGraph, x: Any, start: Any, end: Any = END, step: int = 1) -> Any:
    return g.call(aten.slice.Tensor, x, 1, start, end, step)


def test_slices_of_positions_say_where_they_start() -> None:
    def of(*slices: tuple[Any, ...]) -> tuple[int, int] | None:
        g = PaddedGraph()
        x = g.x("r", "p", 4)
        for each in slices:
            x = cut(g, x, *each)
        return positions(g, x)

    assert of((0, END)) == (0, 0)
    assert of((1, END)) == (1, 1)
    assert of((0, -1)) == (0, 1)
    assert of((1, -2)) == (1, 3)
    assert of((1, END), (1, END)) == (2, 2)
    assert of((1, END), (0, -1)) == (1, 2)
    assert of((0, -1), (1, END)) == (1, 2)
    assert of((None, -1)) == (0, 1)
    assert of((-2, END)) is None
    assert of((0, END, 2)) is None
    assert of((0, 4)) is None


def test_what_is_of_the_batch_alone_has_no_offset() -> None:
    g = PaddedGraph()
    labels = g.batch("r", "p")
    assert positions(g, cut(g, labels, 1)) == (0, 1)


def test_offsets_come_from_the_models_own_operand() -> None:
    for model_first in (True, False):
        g = PaddedGraph()
        x = cut(g, g.x("r", "p"), 1)
        labels = cut(g, g.batch("r", "p"), 0, -1)
        assert positions(g, g.call(aten.mul.Tensor, *((x, labels) if model_first else (labels, x)))) == (1, 1)


def test_a_slice_taken_from_a_size_that_may_be_another() -> None:
    g = PaddedGraph()
    assert positions(g, cut(g, g.x("r", "p", 4), g.call(operator.sub, g.size("r"), 3))) is None


def test_what_moved_along_positions_still_has_rows_and_positions() -> None:
    """Which tokens stand there is no layout's business: what was moved is computed padded, of all positions."""
    for target, args in ((aten.flip.default, ([1],)), (aten.roll.default, ([1], [1])), (aten.cumsum.default, (1,))):
        g = PaddedGraph()
        moved = g.call(target, g.x("r", "p", 4), *args)
        after = g.call(aten.relu.default, moved)
        g.output(after)
        known = g.layouts()
        assert known[moved] == known[after] == ((ROWS,), (Positions(g.symbol("p")),), (4,))


def test_what_a_broken_sort_moved_is_forgotten() -> None:
    """Entries of all rows stand mixed there, and no dimension counts rows or positions."""
    g = PaddedGraph()
    keys = g.call(aten.reshape.default, g.call(aten.argmax.default, g.x("r", "p", 4), -1), [-1])
    order = g.call(operator.getitem, g.call(aten.sort.default, keys), 1)
    moved = g.call(aten.index.Tensor, g.merged(g.x("r", "p", 4)), [order])
    after = g.call(aten.relu.default, moved)
    g.output(after, g.call(aten.cumsum.default, order, 0))
    known = g.layouts()
    assert moved not in known
    assert after not in known


def test_dimensions_are_those_of_the_operand_and_not_of_the_size_alone() -> None:
    g = PaddedGraph()
    x = g.call(aten.transpose.int, g.merged(g.x("r", "p", 4)), 0, 1)
    g.output(x)
    layout = g.layouts()[x]
    assert layout[0] == (4,)
    assert layout[1][0] is ROWS
    assert isinstance(layout[1][1], Positions)
