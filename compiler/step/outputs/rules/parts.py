"""Functions that take some positions, or put positions together: slices, indices, masks, `split`, `cat`, `stack`."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.step.outputs.rules.operands import NotPacked, shared
from deepytorch.compiler.step.outputs.tokens import Pads, Place, Tokens, all_of


def getitem(function: Any, x: Any, key: Any) -> Any:
    """Index by slices of rows, positions and features, by a mask of tokens, or by one position of each row."""
    if not isinstance(x, Tokens) or x.swapped:
        raise NotPacked
    if isinstance(key, Tensor | Tokens) and key.dtype is torch.bool:
        return _masked(x, key)
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(each, Tensor | Tokens | Sequence) for each in keys):
        return _picked_by_index(x, keys)
    if not all(isinstance(each, int | slice | EllipsisType) for each in keys) or any(
        isinstance(each, bool) for each in keys
    ):
        raise NotPacked
    if keys.count(Ellipsis) > 1 or len(keys) - keys.count(Ellipsis) > len(x.shape):
        raise NotPacked
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [slice(None)] * (len(x.shape) - len(keys))
    of_tokens, of_features = keys[: x.num_token_dims], keys[x.num_token_dims :]
    if x.num_token_dims == 2 and isinstance(of_tokens[1], int):
        return _picked_column(x, of_tokens, of_features)
    if x.num_token_dims == 2 and isinstance(of_tokens[0], int):
        return _row(getitem(function, x, (slice(None), *keys[1:])), of_tokens[0])
    for dim, each in enumerate(of_tokens):
        x = _cut(x, dim, each)
    if all(each == slice(None) for each in of_features):
        return x
    inside = (slice(None), *of_features)
    features = torch.empty(x.features, device="meta")[tuple(of_features)].shape
    return x.later(lambda rows: rows[inside], features=features)


def _cut(x: Tokens, dim: int, key: Any) -> Tokens:
    """Return `x` with `key` applied to one of its token dimensions."""
    if not isinstance(key, slice) or not all(each is None or isinstance(each, int) for each in (key.start, key.stop)):
        raise NotPacked
    start, stop, step = key.indices(x.place.grid[dim])
    if step != 1 or stop <= start:
        raise NotPacked
    place, kept = x.place.sliced(dim, start, stop)
    if place is x.place:
        return x
    if place.count == 0:
        raise NotPacked
    assert kept is not None
    return x.later(lambda rows: rows.index_select(0, kept), place=place)


def _row(x: Tokens, number: int) -> Tokens:
    """Return one row of a padded value, (positions, *features)."""
    rows, positions = x.place.grid
    if not -rows <= number < rows:
        raise NotPacked  # eager says what is wrong
    row = _cut(x, 0, slice(number % rows, number % rows + 1))
    return row.later(lambda rows: rows, place=row.place.reshaped((positions,)))


def unbind(function: Any, x: Any, dim: int = 0) -> Any:
    """Return every row, as a loop over a tensor does."""
    if not isinstance(x, Tokens) or x.swapped or x.num_token_dims != 2 or dim not in (0, -len(x.shape)):
        raise NotPacked
    return tuple([_row(x, number) for number in range(x.shape[0])])


def _masked(x: Tokens, mask: Tensor | Tokens) -> Tensor:
    """Return `x[mask]`, (true, *features), for a mask that is off at pads."""
    place = x.place
    if isinstance(mask, Tokens):
        if mask.features or mask.swapped or not mask.place.is_like(place) or not mask.pads.are_zero():
            raise NotPacked
        return x.rows()[mask.rows()]
    if tuple(mask.shape) != place.grid or not place.is_off_at_pads(mask):
        raise NotPacked
    return x.rows()[place.take(mask)]


def masked_select(function: Any, x: Any, mask: Any) -> Any:
    """Select tokens by a mask."""
    if not isinstance(x, Tokens) or x.swapped or x.features or not isinstance(mask, Tensor | Tokens):
        raise NotPacked
    return _masked(x, mask)


def _picked_column(x: Tokens, of_tokens: Sequence[Any], of_features: Sequence[Any]) -> Tensor:
    """Return one position of every row, which must be a token in each: `x[:, 0]`."""
    rows, positions = x.place.grid
    column = of_tokens[1]
    if of_tokens[0] != slice(None) or not -positions <= column < positions:
        raise NotPacked
    wanted = torch.arange(rows, device=x.place.at.device) * positions + column % positions
    return _picked(x, wanted, of_features)


def _picked_by_index(x: Tokens, keys: Sequence[Any]) -> Any:
    """Return positions by their indices, which must be those of tokens: `x[rows, positions]`; or rows: `x[rows]`."""
    if x.num_token_dims != 2:
        raise NotPacked
    indices = [_index(key, size, x.place.at.device) for key, size in zip(keys[:2], x.place.grid, strict=False)]
    if len(indices) == 1:
        if indices[0].dim() != 1:
            raise NotPacked
        if indices[0].shape[0] == 0:
            return x.rows()[:0].reshape(0, *x.shape[1:])
        place, entries = x.place.rows_at(indices[0])
        return x.later(lambda rows: rows.index_select(0, entries), place=place)
    rest = list(keys[2:])
    if not all(isinstance(each, slice) for each in rest):
        raise NotPacked
    rows, columns = torch.broadcast_tensors(*indices)
    if rows.dim() != 1:
        raise NotPacked
    return _picked(x, rows * x.place.grid[1] + columns, rest)


def _index(key: Any, size: int, device: torch.device) -> Tensor:
    """Return an index tensor (n,) or (), int64, of numbers from 0 to `size`, for the key of a dimension."""
    index = torch.as_tensor(list(key), device=device) if isinstance(key, range | list) else key
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() > 1:
        raise NotPacked
    if index.device != device or bool(((index < -size) | (index >= size)).any()):
        raise NotPacked  # eager says what is wrong
    return index.long() % size


def _picked(x: Tokens, positions: Tensor, of_features: Sequence[Any]) -> Tensor:
    entries = x.place.entries_at(positions)
    if entries is None:
        raise NotPacked
    return x.rows()[entries][(slice(None), *of_features)]


def narrow(function: Any, x: Any, dim: int, start: Any, length: int) -> Any:
    """Return a slice along one dimension."""
    if not isinstance(x, Tokens) or not isinstance(start, int) or x.swapped:
        raise NotPacked
    dim = dim % len(x.shape)
    start = start % x.shape[dim] if start < 0 else start
    return getitem(function, x, (*[slice(None)] * dim, slice(start, start + length)))


def index_select(function: Any, x: Any, dim: int, index: Any) -> Any:
    """Return rows or features by their indices."""
    if not isinstance(x, Tokens) or x.swapped or not isinstance(index, Tensor):
        raise NotPacked
    dim = dim % len(x.shape)
    if dim >= x.num_token_dims:
        picked = x.rows().index_select(dim - x.num_token_dims + 1, index)
        return Tokens.of(x.place, picked, Pads(x.pads.zero, x.pads.finite))
    if dim != 0 or index.dim() != 1 or bool((index < 0).any()):
        raise NotPacked
    return _picked_by_index(x, [index])


def split(function: Any, x: Any, size: Any, dim: int = 0) -> Any:
    """Return pieces of given sizes along one dimension."""
    if not isinstance(x, Tokens) or x.swapped:
        raise NotPacked
    dim = dim % len(x.shape)
    whole = x.shape[dim]
    sizes = size if isinstance(size, Sequence) else [size] * -(-whole // size) if isinstance(size, int) else None
    if sizes is None or (isinstance(size, Sequence) and sum(size) != whole):
        raise NotPacked
    return _pieces(x, sizes, dim)


def chunk(function: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    """Return a given number of pieces along one dimension."""
    if not isinstance(x, Tokens) or x.swapped or chunks < 1:
        raise NotPacked
    whole = x.shape[dim % len(x.shape)]
    return split(function, x, max(1, -(-whole // chunks)), dim)


def _pieces(x: Tokens, sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    pieces, start = [], 0
    for size in sizes:
        stop = min(start + size, x.shape[dim])
        pieces.append(getitem(None, x, (*[slice(None)] * dim, slice(start, stop))))
        start = stop
    return tuple(pieces)


def cat(function: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Concatenate along features, along rows, or along the merged rows and positions."""
    dim = kwargs.pop("axis", dim)
    if kwargs or not all(isinstance(each, Tokens) and not each.swapped for each in tensors):
        raise NotPacked
    first: Tokens = tensors[0]
    tokens, dims = first.num_token_dims, len(first.shape)
    if any(len(each.shape) != dims for each in tensors):
        raise NotPacked
    dim = dim % dims
    if dim >= tokens:
        place, _ = shared(tensors)
        pads = Pads(finite=all_of(*(each.pads.finite for each in tensors)))
        return Tokens.of(place, torch.cat([each.rows() for each in tensors], dim - tokens + 1), pads)
    if dim != 0 or any(
        (each.features, each.place.grid[1:]) != (first.features, first.place.grid[1:]) for each in tensors
    ):
        raise NotPacked
    place = Place.joined([each.place for each in tensors])
    zero, finite = (all_of(*(getattr(each.pads, name) for each in tensors)) for name in ("zero", "finite"))
    return Tokens.of(place, torch.cat([each.rows() for each in tensors]), Pads(zero, finite))


def stack(function: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Put rows together that a loop has treated one by one."""
    if kwargs or not all(isinstance(each, Tokens) and each.num_token_dims == 1 for each in tensors):
        raise NotPacked
    if dim not in (0, -1 - len(tensors[0].shape)) or any(each.shape != tensors[0].shape for each in tensors):
        raise NotPacked
    rows = [each.later(lambda rows: rows, place=each.place.reshaped((1, each.place.size))) for each in tensors]
    return cat(function, rows)
