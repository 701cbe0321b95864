"""Values of tokens alone, and the places of these tokens in a padded batch: the material of a packed step's outputs."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from deepytorch.compiler.step.past import Modes
from deepytorch.passes.ops.pack import pack_rows, unpack_rows

Grid = tuple[int, ...]


class Place:
    """The places of the entries of packed rows in their padded grid.

    grid: the sizes of the token dimensions, (rows, positions) or, merged, (rows * positions,). at: (entries,) int64,
    ascending, the index of every entry in the flattened grid. Positions without an entry are pads.
    """

    __slots__ = ("__weakref__", "_before", "_derived", "_masks", "_ranks", "at", "cut_from", "grid", "unmerged")

    def __init__(self, grid: Grid, at: torch.Tensor, unmerged: Grid | None = None) -> None:
        self.grid, self.at = grid, at
        self.unmerged = grid if len(grid) == 2 else unmerged  # the grid of two dimensions that was merged into this one
        self.cut_from: tuple[Place, int, int] | None = None  # the whole, start and stop along its first dimension
        self._before: weakref.ref[Place] | None = None  # the place that was reshaped to this one
        self._derived: dict[tuple[object, ...], tuple[Place, torch.Tensor | None]] = {}
        self._masks: list[tuple[torch.Tensor, int, bool]] = []
        self._ranks: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return self.at.shape[0]

    @property
    def size(self) -> int:
        """Return the number of positions of the grid, pads among them."""
        return math.prod(self.grid)

    def is_like(self, other: Place) -> bool:
        """Return whether the entries of both places stand at the same positions of grids of one shape."""
        if self is other:
            return True
        if self.grid != other.grid or self.count != other.count:
            return False
        return self.at is other.at or (self.at.device == other.at.device and bool(torch.equal(self.at, other.at)))

    def coordinates(self) -> tuple[torch.Tensor, ...]:
        """Return the index of every entry along each dimension of the grid, each (entries,) int64."""
        if len(self.grid) == 1:
            return (self.at,)
        return torch.div(self.at, self.grid[1], rounding_mode="floor"), self.at % self.grid[1]

    def reshaped(self, grid: Grid) -> Place:
        """Return the place of these entries in another grid of as many positions."""
        if grid == self.grid:
            return self
        before = None if self._before is None else self._before()
        if before is not None and grid == before.grid:
            return before
        key = ("reshaped", grid)
        if key not in self._derived:
            place = Place(grid, self.at, self.unmerged if len(grid) == 1 else None)
            place._before = weakref.ref(self)
            self._derived[key] = (place, None)
        return self._derived[key][0]

    def sliced(self, dim: int, start: int, stop: int) -> tuple[Place, torch.Tensor | None]:
        """Return the place cut to `start:stop` along `dim`, and the entries left, (entries,) int64; None for all."""
        if (start, stop) == (0, self.grid[dim]):
            return self, None
        key = ("sliced", dim, start, stop)
        if key not in self._derived:
            along = self.coordinates()
            kept = ((along[dim] >= start) & (along[dim] < stop)).nonzero().squeeze(1)
            cut = [each[kept] - (start if number == dim else 0) for number, each in enumerate(along)]
            grid = tuple(stop - start if number == dim else size for number, size in enumerate(self.grid))
            at = cut[0] if len(grid) == 1 else cut[0] * grid[1] + cut[1]
            place = Place(grid, at)
            if dim == 0:
                place.cut_from = (self, start, stop)
            self._derived[key] = (place, kept)
        return self._derived[key]

    def rows_at(self, index: torch.Tensor) -> tuple[Place, torch.Tensor]:
        """Return the place of some rows, in any order, and their entries, (entries,) int64. index: (rows,) int64."""
        rows, columns = self.coordinates()
        counts = torch.bincount(rows, minlength=self.grid[0])
        lengths, starts = counts[index], (counts.cumsum(0) - counts)[index]
        of_row = torch.arange(index.shape[0], device=index.device).repeat_interleave(lengths)
        entries = (starts - (lengths.cumsum(0) - lengths))[of_row] + torch.arange(of_row.shape[0], device=index.device)
        return Place((index.shape[0], self.grid[1]), of_row * self.grid[1] + columns[entries]), entries

    @staticmethod
    def joined(places: Sequence[Place]) -> Place:
        """Return the place of the entries of several grids that are concatenated along their first dimension.

        It is the whole that the places were cut from, if they are all of it.
        """
        whole = places[0].cut_from[0] if places[0].cut_from is not None else None
        if whole is not None and whole._is_all_of(places):
            return whole
        starts = itertools.accumulate((each.size for each in places), initial=0)
        at = torch.cat([each.at + start for each, start in zip(places, starts, strict=False)])
        return Place((sum(each.grid[0] for each in places), *places[0].grid[1:]), at)

    def _is_all_of(self, places: Sequence[Place]) -> bool:
        """Return whether these places are parts cut from this one, all of them, in their order."""
        reached = 0
        for each in places:
            if each.cut_from is None or each.cut_from[:2] != (self, reached):
                return False
            reached = each.cut_from[2]
        return reached == self.grid[0]

    def moved(self, device: torch.device) -> Place:
        """Return the place with its tensors on another device."""
        if device == self.at.device:
            return self
        key = ("moved", device)
        if key not in self._derived:
            self._derived[key] = (Place(self.grid, self.at.to(device), self.unmerged), None)
        return self._derived[key][0]

    def entries_at(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the entries at these positions of the flattened grid, int64; None if one of the positions is a pad."""
        if self._ranks is None:
            self._ranks = self.at.new_full((self.size,), -1)
            self._ranks[self.at] = torch.arange(self.count, device=self.at.device)
        found = self._ranks[positions]
        return None if bool((found < 0).any()) else found

    def spread(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's first dimensions are those of the grid, or 1."""
        sizes = tensor.shape[: len(self.grid)]
        return len(sizes) == len(self.grid) and all(
            size in (1, own) for size, own in zip(sizes, self.grid, strict=True)
        )

    def take(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the entries of a padded tensor, packed. Its first dimensions are those of the grid, or 1."""
        dims = len(self.grid)
        if tuple(padded.shape[:dims]) == self.grid:
            flat = padded if dims == 1 else padded.flatten(0, 1)
            return pack_rows(flat, self.at)
        if all(size == 1 for size in padded.shape[:dims]):
            return padded if dims == 1 else padded.flatten(0, 1)  # (1, ...), to broadcast
        along = self.coordinates()
        zero = torch.zeros_like(along[0])
        return padded[tuple(each if size != 1 else zero for each, size in zip(along, padded.shape, strict=False))]

    def is_off_at_pads(self, flags: torch.Tensor) -> bool:
        """Return whether a tensor (*grid), or with 1 in place of some sizes, is zero or false at every pad.

        This takes one synchronisation with the device; the answer is remembered.
        """
        if self.count == self.size:
            return True
        for known, version, answer in self._masks:
            if known is flags and version == flags._version:
                return answer
        whole = flags.detach().expand(self.grid).reshape(-1)
        answer = bool(torch.count_nonzero(whole) == torch.count_nonzero(whole[self.at]))
        if not flags.is_inference():
            self._masks.append((flags, flags._version, answer))
        return answer


Condition = Callable[[], bool]  # evaluated only when somebody has to know


def always() -> bool:
    """Return True: the condition that holds."""
    return True


def never() -> bool:
    """Return False: the condition of which nothing is known, and which so does not hold."""
    return False


def all_of(*conditions: Condition) -> Condition:
    """Return the condition that all of several conditions hold."""
    left = [each for each in conditions if each is not always]
    if never in left:
        return never
    return (left[0] if len(left) == 1 else lambda: all(each() for each in left)) if left else always


def any_of(*conditions: Condition) -> Condition:
    """Return the condition that one of several conditions holds; they are evaluated in their order."""
    left = [each for each in conditions if each is not never]
    if always in left:
        return always
    return (left[0] if len(left) == 1 else lambda: any(each() for each in left)) if left else never


class AsItWas:
    """A condition on the present value of a script's tensor; the tensor is looked at once at most.

    The condition does not hold if the tensor has changed before the look.
    """

    def __init__(self, watched: torch.Tensor, look: Condition) -> None:
        self._watched, self._look = watched, look
        self._version = None if watched.is_inference() else watched._version
        self._answer: bool | None = None

    def __call__(self) -> bool:
        if self._answer is None:
            changed = self._version is not None and self._watched._version != self._version
            self._answer = not changed and self._look()
        return self._answer


@dataclass(frozen=True, eq=False)
class Pads:
    """The conditions on a packed value's pads.

    zero: the padded value holds zeros, or False, at every pad. finite: it holds no infinity and no NaN there, for a
    model whose own numbers are finite; only then the product with a mask is zero.
    """

    zero: Condition = never
    finite: Condition = always

    def are_zero(self) -> bool:
        """Return whether the padded value holds zeros, or False, at every pad."""
        return self.zero()


UNKNOWN = Pads()
ZERO = Pads(always)
UNSURE = Pads(finite=never)


@dataclass(frozen=True, eq=False)
class Tokens:
    """A padded value of which only the tokens were computed.

    Attributes:
        place: The places of the tokens in the padded grid.
        features: The sizes of the features.
        dtype: Of the rows.
        device: Of the rows.
        make: Gives the rows (entries, *features), made at the first use.
        pads: The conditions on the padded value's pads.
        swapped: Whether the padded value is (rows, features, positions), as `cross_entropy` takes it, and not (rows,
            positions, features).
        requires_grad: Of the rows.
    """

    place: Place
    features: Grid
    dtype: torch.dtype
    device: torch.device
    make: Callable[[], torch.Tensor]
    pads: Pads = UNKNOWN
    swapped: bool = False
    requires_grad: bool = False

    @staticmethod
    def of(place: Place, rows: torch.Tensor, pads: Pads = UNKNOWN) -> Tokens:
        """Return the tokens of rows that are computed already."""
        make = lambda: rows  # noqa: E731
        if not rows.dtype.is_floating_point and not rows.dtype.is_complex:
            pads = replace(pads, finite=always)
        return Tokens(
            place, tuple(rows.shape[1:]), rows.dtype, rows.device, make, pads, requires_grad=rows.requires_grad
        )

    @property
    def shape(self) -> Grid:
        """Return the padded value's shape."""
        if self.swapped:
            return (self.place.grid[0], *self.features, self.place.grid[1])
        return (*self.place.grid, *self.features)

    @property
    def num_token_dims(self) -> int:
        """Return the number of token dimensions, which are the first of the shape."""
        return len(self.place.grid)

    def rows(self) -> torch.Tensor:
        """Return the packed rows, (entries, *features)."""
        return self.make()

    def later(
        self,
        operation: Callable[[torch.Tensor], torch.Tensor],
        *,
        place: Place | None = None,
        features: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tokens:
        """Return the tokens after a view or a cast; their rows are made at the first use."""
        return replace(
            self,
            place=self.place if place is None else place,
            features=self.features if features is None else tuple(features),
            dtype=dtype or self.dtype,
            device=device or self.device,
            make=Once(lambda: operation(self.rows())),
            requires_grad=self.requires_grad and torch.is_grad_enabled() and (dtype or self.dtype).is_floating_point,
        )

    def padded_with_zeros(self) -> torch.Tensor:
        """Return the padded value, with zeros at pads."""
        flat = unpack_rows(self.rows(), self.place.at, self.place.size)
        whole = flat.reshape(*self.place.grid, *self.features)
        return whole.movedim(1, -1) if self.swapped else whole


Value = TypeVar("Value")


class Memo(Generic[Value]):
    """A value that is made at the first call."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make: Callable[[], Value] | None = make

    def __call__(self) -> Value:
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value


class Once:
    """A tensor that is made at the first call, under the present modes. modes: other ones."""

    __slots__ = ("_make", "_modes", "_value")

    def __init__(self, make: Callable[[], torch.Tensor], modes: Modes | None = None) -> None:
        self._make: Callable[[], torch.Tensor] | None = make
        self._modes = Modes() if modes is None else modes
        self._value: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self._value is None:
            assert self._make is not None
            with self._modes.entered():
                self._value = self._make()
            self._make = None
        return self._value
