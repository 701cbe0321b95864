"""Inputs and expected outputs of collectives: whole numbers that differ by rank and position, with exact sums.

The numbers repeat after `TILE` positions, a prime, so that a misplaced chunk is detected: no power of two is a multiple
of it. A tile is filled in and compared block by block, at memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepytorch.errors import ConfigError

TILE = 65_521

_BLOCK_TILES = 32  # compared at a time: a comparison allocates less than 40 MB
# Limits up to which sums of whole numbers are exact. bfloat16 counts to 2**8; 8-bit integers must not wrap around.
_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
_EXACT_WIDE = 1 << 20


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of one rank in a collective; one tensor for both if the op works in place."""

    input: Tensor  # (elements,)
    output: Tensor  # (elements,)

    def clear(self) -> None:
        """Set both to zero, which every op keeps at zero: timed runs neither overflow nor turn to NaN."""
        self.input.zero_()
        self.output.zero_()


@dataclass(frozen=True, slots=True)
class Pattern:
    """Inputs and expected outputs of `ranks` ranks. Raises `ConfigError` if no sum could be exact."""

    dtype: torch.dtype
    redop: str  # sum, avg, min or max
    ranks: int
    compressed: bool = False  # values must survive a half type

    def __post_init__(self) -> None:
        """Raise `ConfigError` for more ranks than the dtype can count."""
        if self._largest < 1:
            raise ConfigError(
                f"The dtype is {self.dtype} and there are {self.ranks} ranks: sums cannot be checked, even of ones. "
                "Take a wider dtype."
            )

    @property
    def _largest(self) -> int:
        exact = _EXACT.get(self.dtype, _EXACT_WIDE)
        return (min(exact, 256) if self.compressed else exact) // self.ranks

    def fill(self, buffers: Buffers, rank: int) -> None:
        """Write the contribution of `rank`.

        A separate output becomes zeros, so that no old value can pass for a result.
        """
        buffers.output.zero_()
        _fill(buffers.input, self._tile(rank).to(self.dtype))

    def num_wrong(self, op: str, buffers: Buffers, rank: int) -> int:
        """Return the number of elements of the output that differ from the result of `op` on `rank`."""
        output, tolerance = buffers.output, 0.0
        if op == "barrier":
            return 0
        if op == "broadcast":
            tiles = [self._tile(0)]
        elif op in ("all_gather", "all_to_all"):
            start = rank * output.numel() // self.ranks if op == "all_to_all" else 0
            tiles = [self._tile(k).roll(-start % TILE) for k in range(self.ranks)]
        else:
            start = rank * output.numel() if op == "reduce_scatter" else 0
            tiles, tolerance = [self._reduced().roll(-start % TILE)], self._tolerance
        chunks = zip(output.chunk(len(tiles)), tiles, strict=True)
        return sum(_num_different(chunk, tile.to(self.dtype), tolerance) for chunk, tile in chunks)

    @property
    def _tolerance(self) -> float:
        """Return the absolute tolerance.

        An average over a number of ranks that is no power of two has inexact terms.
        """
        if self.redop != "avg" or self.ranks & (self.ranks - 1) == 0:
            return 0.0
        return (self.ranks + 1) * torch.finfo(self.dtype).eps * self._largest

    def _tile(self, rank: int) -> Tensor:
        """Return the (TILE,) int64 numbers of `rank`, drawn once by a generator of its own."""
        lowest = 0 if self.dtype == torch.uint8 else -self._largest
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randint(lowest, self._largest + 1, (TILE,), generator=generator)

    def _reduced(self) -> Tensor:
        """Return the (TILE,) reduced numbers in the dtype."""
        tiles = torch.stack([self._tile(rank) for rank in range(self.ranks)])
        if self.redop in ("min", "max"):
            reduced = tiles.amin(0) if self.redop == "min" else tiles.amax(0)
        else:
            reduced = tiles.sum(0)
        return (reduced.double() / self.ranks if self.redop == "avg" else reduced).to(self.dtype)


def _fill(tensor: Tensor, tile: Tensor) -> None:
    whole = tensor.numel() // TILE * TILE
    tensor[:whole].view(-1, TILE).copy_(tile.expand(whole // TILE, TILE))
    tensor[whole:].copy_(tile[: tensor.numel() - whole])


def _num_different(tensor: Tensor, tile: Tensor, tolerance: float) -> int:
    whole = tensor.numel() // TILE * TILE
    blocks = [*tensor[:whole].view(-1, TILE).split(_BLOCK_TILES), tensor[whole:]]
    different = 0
    for block in blocks:
        expected = tile[: block.shape[-1]]
        if tolerance:
            wrong = ~((block.double() - expected.double()).abs() <= tolerance)  # NaN is wrong too
        else:
            wrong = block != expected
        different += int(wrong.sum())
    return different
