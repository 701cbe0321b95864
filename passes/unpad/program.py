"""The program of a packed graph, which `StripPadding` hands to the run time.

The program says how to feed the graph and how to read its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx


class IndexSet(NamedTuple):
    """A set of entries of a token space, in row-major order: its tokens, or only the tokens that a loss reads.

    Attributes:
        space: the number of the token space.
        loss: None for tokens; else the number of the loss whose label is not ignored there.
        offset: narrows tokens, with `cut`, to the positions `offset` to `positions - cut + offset`.
        cut: see `offset`.
    """

    space: int
    loss: int | None = None
    offset: int = 0
    cut: int = 0

    @property
    def is_tokens(self) -> bool:
        """Return whether these are all tokens of the space."""
        return self.loss is None and self.offset == 0 and self.cut == 0


class IndexInput(NamedTuple):
    """An input that the packed graph takes after the inputs of the region.

    kind is one of:

    - "flat": row * positions + position of every entry of `entries`, (entries,) int64;
    - "rank": the place of each of `entries` among those of `among`, (entries,) int64;
    - "cu_seqlens": cumulative lengths of the space's rows, (rows + 1,) int32;
    - "longest": a tensor of shape (longest row, 0), whose first size is the longest row's length;
    - "picked": the place of the token picked from each row among the space's tokens, (rows,) int64.
    """

    kind: str
    entries: IndexSet
    among: IndexSet | None = None
    pick: int | None = None


@dataclass(frozen=True)
class SpaceFacts:
    """The facts about one token space.

    mask: the output of `Program.facts` that holds the token mask. None: all positions are tokens or, with `trimmed_by`,
    the positions up to the last one whose label these losses do not ignore.
    """

    name: str
    mask: int | None
    reading: str | None
    trimmed_by: tuple[int, ...] = ()
    contiguous: bool = False  # a window measures distances between tokens
    prefix: bool = False  # a causal attention has no key mask, so tokens must come first in each row
    begins: bool = False  # pads before the first token of a row would see no key and be NaN
    max_positions: int | None = None


@dataclass(frozen=True)
class LossFacts:
    """The facts about one loss over tokens.

    target: the output of `Program.facts` with the labels, (rows, positions - cut). ignores_pads: the loss runs on
    tokens or on labelled entries only, so that no label may stand at a padded position.
    """

    space: int
    target: int
    ignore_index: int
    offset: int
    cut: int
    ignores_pads: bool = True


@dataclass(frozen=True)
class PickFacts:
    """The facts about a pick of one position per row.

    position: a constant; negative counts from the end. output: otherwise, the output of `Program.facts` that holds row
    * positions + position, (rows,).
    """

    space: int
    position: int | None
    output: int | None


@dataclass(frozen=True)
class Assumption:
    """A condition on output `output` of `Program.facts` that must hold at run time.

    kind "zero at pads": the value is zero or false wherever `space` has no token. "binary": 0 or 1 only. "additive": 0
    or very low numbers only. "mask as meant", "same tokens": the value is false everywhere (see `mask_checks`).
    """

    kind: str
    output: int
    space: int = 0
    offset: int = 0
    cut: int = 0


@dataclass(frozen=True)
class BufferState:
    """The state of a buffer when masks were proved with it. sample: some of its values."""

    input: int
    tensor: torch.Tensor
    version: int
    sample: torch.Tensor | None


@dataclass(frozen=True)
class OutputMeta:
    """The metadata of a deferred output.

    sizes_of: maps the numbers of rows and of every space's positions to its shape.
    """

    name: str
    dtype: torch.dtype
    sizes_of: Callable[..., Sequence[int]]

    def shape(self, rows: int, *positions: int) -> tuple[int, ...]:
        """Return the shape for a batch of so many rows, whose spaces have so many positions."""
        return tuple(map(int, self.sizes_of(rows, *positions)))


@dataclass(frozen=True)
class Output:
    """One output of the region.

    Attributes:
        kind: "value": output `index` of the packed graph. "tokens": only the tokens of the output, in the packed
            graph's output `index`. "epilogue": deferred, computed by epilogue `index`. "replayed": deferred, computed
            by a padded replay of the step.
        index: see `kind`.
        meta: the shape, dtype and name of an output that leaves the region packed or deferred.
        entries: for "tokens" and "epilogue", the entries that the value holds one row for; None if it is the whole
            padded value.
        merged: whether the padded value is (rows * positions, ...).
        zero_at_pads: whether the padded value is known to be zero at pads.
    """

    kind: str
    index: int = 0
    meta: OutputMeta | None = None
    entries: IndexSet | None = None
    merged: bool = False
    zero_at_pads: bool = False


@dataclass(frozen=True)
class Epilogue:
    """The computation of a deferred output.

    `module` takes the region's inputs `inputs`, the packed graph's outputs `values` and the index inputs `indices`, in
    this order, and returns the output: padded, or only the entries that `Output.entries` names.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    indices: tuple[IndexInput, ...]
    values: tuple[int, ...]


@dataclass
class Program:
    """A packed region, ready to run."""

    facts: fx.GraphModule  # takes the region's inputs `facts_inputs`
    facts_inputs: tuple[int, ...]
    spaces: tuple[SpaceFacts, ...]
    losses: tuple[LossFacts, ...]
    picks: tuple[PickFacts, ...]
    assumptions: tuple[Assumption, ...]
    indices: tuple[IndexInput, ...]
    outputs: tuple[Output, ...]
    epilogues: tuple[Epilogue, ...]
    sizes: tuple[tuple[int, int, int], ...]  # for each space: the input, its dim of rows and its dim of positions
    buffers: tuple[BufferState, ...] = ()
    packed_inputs: tuple[int, ...] = ()
    values: tuple[IndexSet | None, ...] = ()  # for each output of the packed graph: its entries, if it is packed
    reference: Callable[..., Sequence[torch.Tensor]] | None = None  # the packed graph's outputs, padded
    reference_inputs: tuple[int, ...] = ()  # `reference` takes these inputs of the region, and then the following
    reference_indices: tuple[IndexInput, ...] = ()
    costs: tuple[tuple[IndexSet, float], ...] = ()  # multiply-adds per entry of a set, in the packed operators
    sites: list[str] = field(default_factory=list)
    on_host: Any = None  # `facts` for batches that are known on the host, made at the first such batch

    def relative_cost(self, tokens: Sequence[int], labels: Sequence[int], sizes: Sequence[tuple[int, int]]) -> float:
        """Return the packed step's matrix work divided by the padded step's, for the operators that are packed."""
        packed = padded = 0.0
        for entries, cost in self.costs:
            rows, positions = sizes[entries.space]
            packed += cost * (tokens[entries.space] if entries.loss is None else labels[entries.loss])
            padded += cost * rows * positions
        if padded:
            return packed / padded
        return sum(tokens) / max(1, sum(rows * positions for rows, positions in sizes))
