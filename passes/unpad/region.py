"""The findings of the analyses about one graph: its token spaces, and all decisions about its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from deepytorch.passes.base import Decline
from deepytorch.passes.slicing import Slicer, writes_in_place
from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.demand import NOTHING, Demand, Seen, is_float
from deepytorch.passes.unpad.layout import Layout, Positions, Symbols, is_token, positions_of, sorted_of
from deepytorch.passes.unpad.masks import Meaning, TokenSource
from deepytorch.passes.unpad.program import IndexSet


class Declined(Exception):
    """The region stays unchanged."""

    def __init__(self, reason: str, where: str = "region") -> None:
        super().__init__(reason)
        self.where = where


@dataclass
class Space:
    """One token space while its region is analysed."""

    number: int
    symbol: sympy.Symbol
    name: str
    size: tuple[fx.Node, int, int]
    attentions: list[tuple[Attention, Meaning]] = field(default_factory=list)
    source: TokenSource | None = None
    trimmed_by: tuple[int, ...] = ()

    @property
    def strips(self) -> bool:
        """Return whether some positions of this space may be left out."""
        return self.source is not None or bool(self.trimmed_by)


@dataclass
class Region:
    """All findings of the analyses about one graph, and the decisions that follow from them."""

    graph: fx.Graph
    slicer: Slicer
    symbols: Symbols
    layouts: dict[fx.Node, Layout]
    spaces: dict[sympy.Symbol, Space]
    losses: list[fx.Node]
    outputs: list[Any]
    defers: bool  # whether outputs besides a loss may be computed later, or by a padded replay
    declined: list[Decline] = field(default_factory=list)
    packs: bool = False
    meanings: dict[fx.Node, Meaning] = field(default_factory=dict)
    picks: list[fx.Node] = field(default_factory=list)
    zeroing: dict[fx.Node, fx.Node] = field(default_factory=dict)  # zero at pads -> the batch-only factor that does it
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a sum to which pads add zeros -> likewise
    seen: Seen = field(init=False)
    demand: dict[fx.Node, Demand] = field(default_factory=dict)
    entries: dict[fx.Node, IndexSet] = field(default_factory=dict)
    replayed: set[fx.Node] = field(default_factory=set)  # outputs that only a padded replay computes, if they are used

    @property
    def attentions(self) -> list[tuple[Attention, Meaning]]:
        """Return the attentions whose masks are understood, space by space."""
        return [pair for space in self.spaces.values() for pair in space.attentions]

    def zero_factors(self) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
        """Yield the factors that must be zero at pads, each with the packed value and the operator that rest on it."""
        yield from ((factor, node, node) for node, factor in self.zeroing.items() if node in self.entries)
        for node, factor in self.sums.items():
            if node.args[2] in self.entries:
                yield factor, node.args[2], node  # type: ignore[misc]

    @property
    def output_nodes(self) -> list[fx.Node]:
        """Return the outputs that are nodes, each once."""
        return list(dict.fromkeys(node for node in self.outputs if isinstance(node, fx.Node)))

    def stands_in(self, node: Any, space: Space) -> bool:
        """Return whether a node is a token value of this space."""
        return is_token(self.layouts.get(node)) and self.space(node) is space

    def grid(self, node: Any) -> tuple[Space, Positions]:
        """Return the token space of a token value, and the positions of it that the value has."""
        layout = self.layouts[node]
        positions = sorted_of(layout) or positions_of(layout)[0]
        return self.spaces[positions.symbol], positions

    def space(self, node: Any) -> Space:
        """Return the token space of a token value."""
        return self.grid(node)[0]

    def tokens(self, node: fx.Node) -> IndexSet:
        """Return the tokens at a value's positions. An operator with several results has those of its argument."""
        several = isinstance(node.meta.get("val"), (list, tuple))
        space, grid = self.grid(node.args[0] if several else node)
        return IndexSet(space.number, offset=grid.offset, cut=grid.cut)

    def is_boundary(self, node: fx.Node) -> bool:
        """Return whether a deferred output may start from this value, because the step computes it for all tokens."""
        if node.op != "call_function" or self.seen.from_batch[node] or not is_float(node):
            return False
        if node in self.seen.written:  # the output was read before some of the writes
            return False
        if sorted_of(self.layouts.get(node)) is not None:
            return False  # the order of a sort that runs again need not be the same
        if self.demand[node] == NOTHING:
            return False
        entries = self.entries.get(node)
        return entries is None or entries.loss is None

    def epilogue_nodes(self, output: fx.Node) -> list[fx.Node]:
        """Return the nodes that a deferred output needs in addition to those that the step computes."""
        if self.is_boundary(output):
            return []
        stop = frozenset(node for node in self.graph.nodes if self.is_boundary(node))
        nodes = self.slicer.slice([output], stop)
        read = {output, *(node for node in nodes if writes_in_place(node))}
        for node in reversed(nodes):
            if node in read:
                read.update(self.read_late(node))
        return [node for node in nodes if node in read]

    def read_late(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the inputs that a node reads in the graph of a deferred output."""
        rule = self.seen.routed.get(node) if self.packs else None
        return node.all_input_nodes if rule is None else (*rule.reads, *rule.whole)
