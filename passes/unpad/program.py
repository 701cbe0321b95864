"""What `StripPadding` hands to the run time besides the packed graph: how to feed it and how to read its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx


class IndexSet(NamedTuple):
    """Some entries of a token space, in row-major order: its tokens, or those of them that a loss looks at.

    `space` numbers the token space. `loss` is None for tokens, else the number of the loss whose label is not ignored
    there. `offset` and `cut` narrow tokens to the positions `offset` to `positions - cut + offset`.
    """

    space: int
    loss: int | None = None
    offset: int = 0
    cut: int = 0

    @property
    def is_tokens(self) -> bool:
        """Whether these are all tokens of the space."""
        return self.loss is None and self.offset == 0 and self.cut == 0


class IndexInput(NamedTuple):
    """An input that the packed graph takes after those of the region.

    kind "flat": row * positions + position of every entry of `entries`, (entries,) int64. "rank": where `entries` stand
    among those of `among`, (entries,) int64. "cu_seqlens": cumulative lengths of the space's rows, (rows + 1,) int32.
    "longest": a tensor of shape (longest row, 0), whose first size is the longest row's length. "picked": where the
    token picked from each row stands among the space's tokens, (rows,) int64.
    """

    kind: str
    entries: IndexSet
    among: IndexSet | None = None
    pick: int | None = None


@dataclass(frozen=True)
class SpaceFacts:
    """One token space: `mask` is the output of `Program.facts` that holds its token mask (None: every position, or,
    with `trimmed_by`, the positions up to the last one whose label these losses do not ignore).
    """

    name: str
    mask: int | None
    reading: str | None
    trimmed_by: tuple[int, ...] = ()
    contiguous: bool = False  # a window measures distances between tokens
    prefix: bool = False  # a causal attention without a key mask: tokens come first in each row
    max_positions: int | None = None


@dataclass(frozen=True)
class LossFacts:
    """One loss over tokens: `target` is the output of `Program.facts` with its labels, (rows, positions - cut).

    `ignores_pads`: it runs on tokens or on labelled entries only, so that no label may stand at a padded position.
    """

    space: int
    target: int
    ignore_index: int
    offset: int
    cut: int
    ignores_pads: bool = True


@dataclass(frozen=True)
class PickFacts:
    """A pick of one position a row: a constant `position` (negative counts from the end), or an output of
    `Program.facts` holding row * positions + position, (rows,).
    """

    space: int
    position: int | None
    output: int | None


@dataclass(frozen=True)
class Assumption:
    """A value that must hold at run time: output `output` of `Program.facts`.

    kind "zero at pads": it is zero or false wherever no token of `space` stands. "binary": 0 or 1 only. "additive": 0
    or very low numbers only.
    """

    kind: str
    output: int
    space: int = 0
    offset: int = 0
    cut: int = 0


@dataclass(frozen=True)
class BufferState:
    """A buffer as it was when masks were proved with it; `sample` is some of its values."""

    input: int
    tensor: torch.Tensor
    version: int
    sample: torch.Tensor | None


@dataclass(frozen=True)
class OutputMeta:
    """What a deferred output looks like. `sizes_of` maps the rows and the positions of every space to its shape."""

    name: str
    dtype: torch.dtype
    sizes_of: Callable[..., Sequence[int]]

    def shape(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The shape for a batch whose spaces have these (rows, positions)."""
        return [*map(int, self.sizes_of(sizes[0][0], *[positions for _, positions in sizes]))]


@dataclass(frozen=True)
class Output:
    """One output of the region. kind "value": output `index` of the packed graph. "tokens": its tokens, which the
    packed graph's output `index` holds. "tail": deferred, computed by tail `index`. "twin": deferred, computed by the
    padded step.

    entries: of "tokens" and "tail", what they hold one row of; None where they hold the whole padded value. merged:
    whether the padded value is (rows * positions, ...). zero_at_pads: whether it is known to be.
    """

    kind: str
    index: int = 0
    meta: OutputMeta | None = None
    entries: IndexSet | None = None
    merged: bool = False
    zero_at_pads: bool = False


@dataclass(frozen=True)
class Tail:
    """A deferred output: `module` takes the region's inputs `inputs`, the packed graph's outputs `values` and the index
    inputs `indices`, in this order, and returns the output, padded or its tokens (`Output.entries`).
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
    tails: tuple[Tail, ...]
    sizes: tuple[tuple[int, int, int], ...]  # of each space: the input, its rows' dim and its positions' dim
    buffers: tuple[BufferState, ...] = ()
    packed_inputs: tuple[int, ...] = ()
    values: tuple[IndexSet | None, ...] = ()  # of each output of the packed graph the entries that it holds, if it does
    reference: Callable[..., Sequence[torch.Tensor]] | None = None  # gives the packed graph's outputs, computed padded
    reference_inputs: tuple[int, ...] = ()  # what it takes: these inputs of the region, and then
    reference_indices: tuple[IndexInput, ...] = ()
    costs: tuple[tuple[IndexSet, float], ...] = ()  # multiply-adds for every entry of a set, in what is packed
    sites: list[str] = field(default_factory=list)
    on_host: Any = None  # `facts` for batches that are known on the host, made when one is met

    def relative_cost(self, tokens: Sequence[int], labels: Sequence[int], sizes: Sequence[tuple[int, int]]) -> float:
        """The packed step's matrix work over that of the padded one, for what is packed."""
        packed = padded = 0.0
        for entries, cost in self.costs:
            rows, positions = sizes[entries.space]
            packed += cost * (tokens[entries.space] if entries.loss is None else labels[entries.loss])
            padded += cost * rows * positions
        if padded:
            return packed / padded
        return sum(tokens) / max(1, sum(rows * positions for rows, positions in sizes))
