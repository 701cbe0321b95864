"""Sizes of packed steps, rounded up to a few by dummy tokens, so that CUDA graphs are recorded a few times only.

[Note: Dummy tokens]
A dummy token is a pad of the batch that is not left out. The proof that pads may be left out says that nothing sees the
values at pads: no label that counts, no token of another row, no output. So the proof holds for each pad that stays.
The packed graph needs three things for that. A dummy stands behind all tokens. A dummy is in a row that it shares with
other dummies only, so keys at dummies are seen by dummies alone. Outputs are cut to the tokens before anybody gets
them. Labelled entries are filled up with entries whose label is ignored. Values at dummies are finite, as at pads, and
their gradients are zero, so sums over tokens (weights, embeddings) are the same with dummies and without.

[Note: Waste]
Between a power of two and its double there are eight sizes: for 2^k < n <= 2^(k+1) the next size is less than 2^k / 8
away, so less than n / 8. Dummies are spread evenly over dummy rows, one for every eight rows of the batch. Their number
is less than an eighth of the longest row for each row of the batch, so less than the longest row for each dummy row: no
dummy row is longer than the longest row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from deepytorch.compiler.step.batch_facts import Facts, Indices, cumulative, places_of
from deepytorch.passes.unpad.program import IndexInput, IndexSet, Program

# Most combinations of sizes, each a recording: 500 random mixtures of 8 rows make 31 to 48; 104 to 140 if labels vary.
MAX_SIZES = 64
_STEPS = 4  # 2 ** 3 sizes up to a power of two
_ROWS = 8  # rows of the batch for a row of dummies


def round_up(count: int) -> int:
    """Return the least size that is not below `count`: a multiple of an eighth of the power of two below `count`."""
    step = 1 << max(0, (count - 1).bit_length() - _STEPS)
    return math.ceil(count / step) * step


def dummy_rows(rows: int) -> int:
    """Return the number of rows for the dummies of a batch with `rows` rows."""
    return math.ceil(rows / _ROWS)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one packed step, for which a CUDA graph is recorded.

    tokens, longest: the tokens of each space and a bound of its longest row, with dummies. labels: the number of each
    loss, and its count of labelled entries.
    """

    rows: int
    tokens: tuple[int, ...]
    longest: tuple[int, ...]
    labels: tuple[tuple[int, int], ...]


class SizeLadder:
    """The rounding of the sizes of one program's batches, to `max_sizes` combinations at most."""

    def __init__(self, program: Program, max_sizes: int = MAX_SIZES) -> None:
        self._program, self._max_sizes = program, max_sizes
        self._losses = sorted({i.entries.loss for i in program.indices if i.entries.loss is not None})
        self._longest = [1] * len(program.spaces)  # bounds of kernels' loops only: they never shrink
        self.known: set[Sizes] = set()

    def fit(self, facts: Facts) -> Sizes | str:
        """Return the sizes for one batch, or the reason for which it runs with its own."""
        tokens = [round_up(count) for count in facts.tokens]
        for (rows, positions), own, rounded in zip(facts.sizes, facts.tokens, tokens, strict=True):
            if rounded > own == rows * positions:
                return "a batch without a pad to fill it up with"
        labels = [round_up(count) for count in facts.labels]
        if self._program.relative_cost(tokens, labels, facts.sizes) > 1:
            return "rounding adds more than there is padding"
        longest = [max(known, _power(max(own))) for known, own in zip(self._longest, facts.lengths, strict=True)]
        sizes = Sizes(
            facts.sizes[0][0], tuple(tokens), tuple(longest), tuple((loss, labels[loss]) for loss in self._losses)
        )
        if sizes not in self.known:
            if len(self.known) >= self._max_sizes:
                return f"{self._max_sizes} combinations of sizes are known already"
            self.known.add(sizes)
        self._longest = longest
        return sizes


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


class RoundedIndices(Indices):
    """Index tensors with dummies, for sets of all tokens and of labelled ones only: see [Note: Dummy tokens]."""

    def __init__(self, facts: Facts, sizes: Sizes) -> None:
        super().__init__(facts)
        self._sizes, self._num_labels = sizes, dict(sizes.labels)
        self._chosen: dict[int, torch.Tensor] = {}

    def _make(self, index: IndexInput) -> torch.Tensor:
        facts, space, loss = self._facts, index.entries.space, index.entries.loss
        if index.kind == "rank":
            assert loss is not None
            return self._labelled(IndexSet(space), loss)
        if index.kind == "cu_seqlens":
            dummies = self._sizes.tokens[space] - sum(facts.lengths[space])
            return cumulative([*facts.lengths[space], *spread(dummies, dummy_rows(self._sizes.rows))])
        if index.kind == "longest":
            return torch.empty((self._sizes.longest[space], 0), device=facts.device)
        return super()._make(index)

    def _entries(self, entries: IndexSet) -> torch.Tensor:
        if entries not in self._flat:
            space = entries.space
            if entries.loss is not None:
                tokens = IndexSet(space)
                self._flat[entries] = self._entries(tokens)[self._labelled(tokens, entries.loss)]
            else:
                assert entries.is_tokens
                found = super()._entries(entries)
                self._flat[entries] = torch.cat([found, self._pads(space, self._sizes.tokens[space] - len(found))])
        return self._flat[entries]

    def _pads(self, space: int, count: int) -> torch.Tensor:
        """Return the places of `count` pads, with repetitions if there are fewer pads."""
        (rows, positions), tokens = self._facts.sizes[space], sum(self._facts.lengths[space])
        pads = places_of(~self._facts.masks[space].reshape(-1), rows * positions - tokens)
        if count > len(pads):
            pads = pads.repeat(math.ceil(count / len(pads)))
        return pads[:count]

    def _labelled(self, tokens: IndexSet, loss: int) -> torch.Tensor:
        """Return the places of a loss's entries among the tokens, filled up with entries whose label is ignored."""
        if loss not in self._chosen:
            own = self._facts.labels[loss]
            counts = self._facts.labelled[loss].reshape(-1)[self._entries(tokens)]
            ignored = places_of(~counts, len(counts) - own)[: self._num_labels[loss] - own]
            self._chosen[loss] = torch.cat([places_of(counts, own), ignored])
        return self._chosen[loss]


def spread(count: int, rows: int) -> list[int]:
    """Return the lengths of `rows` rows that hold `count` tokens together, as even as can be."""
    return [count // rows + (row < count % rows) for row in range(rows)]


def why_not_rounded(program: Program, *, has_bias: bool) -> str | None:
    """Return the reason for which a program's steps cannot have dummy tokens; None if they can.

    has_bias: whether something is added to the scores of an attention.
    """
    asked = [*program.indices, *program.reference_indices]
    sets = [index.entries for index in asked] + [index.among for index in asked if index.among is not None]
    sets += [entries for entries in program.values if entries is not None]
    if has_bias:
        return "a bias is added to the scores of an attention, which has the padded batch's size"
    if any(entries.loss is None and not entries.is_tokens for entries in sets):
        return "the packed step needs parts of the positions"
    if any(program.losses[entries.loss].cut for entries in sets if entries.loss is not None):
        return "labels stand on a part of the positions: shift them by padding, not by slicing"
    return None
