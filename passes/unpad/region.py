"""The findings of the analyses about one graph: its token spaces, and all decisions about its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from deepytorch.passes.base import Decline
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.demand import NOTHING, Demand, Seen, is_float
from deepytorch.passes.unpad.layout import Layout, Symbols, positions_of
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
    """All findings of the analyses about one graph."""

    graph: fx.Graph
    slicer: Slicer
    symbols: Symbols
    layouts: dict[fx.Node, Layout]
    spaces: dict[sympy.Symbol, Space]
    meanings: dict[fx.Node, Meaning]
    seen: Seen
    demand: dict[fx.Node, Demand]
    outputs: list[Any]
    losses: list[fx.Node]
    picks: list[fx.Node]
    exact_outputs: bool  # whether every output is seen at pads as well
    zeroing: dict[fx.Node, fx.Node]  # value that is zero at pads -> the batch-only factor that makes it so
    entries: dict[fx.Node, IndexSet]
    declined: list[Decline]
    packs: bool
    replayed: set[fx.Node] = field(default_factory=set)  # outputs that only a padded replay computes, if they are used

    def space(self, node: fx.Node) -> Space:
        """Return the token space of a token value."""
        return self.spaces[positions_of(self.layouts[node])[0].symbol]

    def is_boundary(self, node: fx.Node) -> bool:
        """Return whether a deferred output may start from this value, because the step computes it for all tokens."""
        if node.op != "call_function" or self.seen.from_batch[node] or not is_float(node):
            return False
        if self.demand[node] == NOTHING:
            return False
        entries = self.entries.get(node)
        return entries is None or entries.loss is None

    def epilogue_nodes(self, output: fx.Node) -> list[fx.Node]:
        """Return the nodes that a deferred output needs in addition to those that the step computes."""
        if self.is_boundary(output):
            return []
        stop = frozenset(node for node in self.graph.nodes if self.is_boundary(node))
        return self.slicer.slice([output], stop)
