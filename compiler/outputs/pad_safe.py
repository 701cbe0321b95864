"""What may be done with a packed value and still give what eager gives: one table of torch functions.

An entry takes the arguments of a call in which `Tokens` stand for padded tensors, and gives `Tokens` again (the result
at tokens, its pads left open), a plain tensor (nobody's pads are in it), or `NotImplemented`: then the padded value
has to be had. Three kinds of functions are here: those that work position by position; those that look at some
positions only, if these are tokens (indexing, a loss whose labels are ignored at pads); and sums over values that are
zero at pads.

What holds of values holds of gradients: where no pad has a part in a result, none gets a gradient from it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepytorch.compiler.outputs.tokens import UNKNOWN, ZERO, AllOf, AnyOf, Grid, OffBy, Pads, Place, Tokens

Rule = Callable[..., Any]


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`function(*args, **kwargs)` on packed values; `NotImplemented` where only padded ones will do."""
    rule = TABLE.get(function)
    if rule is None or kwargs.get("out") is not None or kwargs.get("inplace"):
        return NotImplemented
    try:
        return rule(function, *args, **kwargs)
    except _NotPacked:
        return NotImplemented
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError):  # a call that is wrong: eager says what is wrong with it
        return NotImplemented


def row_by_row(rows: Sequence[int], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of which it is known that it works row by row: some of its arguments, and its results, are
    (rows, ...).
    """
    place = next((args[index].place for index in rows if isinstance(args[index], Tokens)), None)
    if place is None or len(place.grid) != 1:
        return NotImplemented
    given = list(args)
    for index, each in enumerate(args):
        if index not in rows:
            if isinstance(each, Tokens):
                return NotImplemented
        elif isinstance(each, Tokens):
            if not each.place.is_like(place):
                return NotImplemented
            given[index] = each.rows()
        else:
            given[index] = place.take(each)
    made = function(*given)
    if isinstance(made, Tensor):
        return Tokens.of(place, made)
    return [Tokens.of(place, each) if isinstance(each, Tensor) else each for each in made]


class _NotPacked(Exception):
    """The padded value has to be had."""


# ---------------------------------------------------------------------- position by position


def _shared(operands: Sequence[Any]) -> tuple[Place, int]:
    """The place that all packed operands share, and how many dimensions their padded values have."""
    packed = [each for each in operands if isinstance(each, Tokens)]
    place, dims = packed[0].place, len(packed[0].shape)
    for each in packed:
        if each.swapped or len(each.shape) != dims or not each.place.is_like(place):
            raise _NotPacked
    return place, dims


def _aligned(operand: Any, place: Place, dims: int) -> Any:
    """An operand as it meets packed rows: (entries or 1, *features), or without token dimensions."""
    if isinstance(operand, Tokens):
        return operand.rows()
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    if operand.dim() > dims or operand.is_sparse:
        raise _NotPacked
    missing = dims - operand.dim()
    if missing >= len(place.grid):
        return operand
    whole = operand[(None,) * missing] if missing else operand
    if not place.spread(whole):
        raise _NotPacked
    return place.take(whole)


def _flags(operand: Tensor, place: Place, dims: int, inverted: bool) -> Callable[[], Tensor] | None:
    """Gives where a plain operand is not zero, or, inverted, where it is: (*grid), or the same along some of it. None
    where it has no part in the grid.
    """
    if operand.dim() != dims or not place.spread(operand):
        return None
    tokens = len(place.grid)
    operand = operand.detach()
    if all(size == 1 for size in operand.shape[tokens:]):
        flags = operand.reshape(operand.shape[:tokens])
        return flags.logical_not if inverted else (lambda: flags)
    compare = torch.eq if inverted else torch.ne
    return lambda: compare(operand, 0).flatten(tokens).any(-1)


def _off(operand: Any, place: Place, dims: int, *, inverted: bool = False) -> Pads:
    """That an operand is zero at pads, or, inverted, that it is not: a packed one's own pads, or a plain one's, looked
    at when it matters.
    """
    if isinstance(operand, Tokens):
        return UNKNOWN if inverted else operand.pads
    if not isinstance(operand, Tensor):
        return ZERO if isinstance(operand, bool | int | float) and bool(operand) == inverted else UNKNOWN
    whole = operand.expand(*place.grid, *[1] * (dims - len(place.grid))) if operand.dim() == 0 else operand
    flags = _flags(whole, place, dims, inverted)
    return UNKNOWN if flags is None else OffBy(place, flags, operand)


def _pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _apply(function, args, kwargs, UNKNOWN)


def _apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pads: Pads) -> Any:
    """A function that works position by position."""
    operands = [*args, *kwargs.values()]
    place, dims = _shared(operands)
    rows = function(
        *(_aligned(each, place, dims) for each in args),
        **{name: _aligned(each, place, dims) for name, each in kwargs.items()},
    )
    if not isinstance(rows, Tensor) or rows.dim() != dims - len(place.grid) + 1 or rows.shape[0] != place.count:
        raise _NotPacked
    return Tokens.of(place, rows, pads)


def _keeps_zeros(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """f(0) = 0, whatever the other arguments are."""
    if not isinstance(x, Tokens) or any(isinstance(each, Tokens | Tensor) for each in (*args, *kwargs.values())):
        return _pointwise(function, x, *args, **kwargs)
    return _apply(function, (x, *args), kwargs, x.pads)


def _product(function: Any, x: Any, y: Any) -> Any:
    place, dims = _shared((x, y))
    return _apply(function, (x, y), {}, AnyOf(_off(x, place, dims), _off(y, place, dims)))


def _quotient(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """Zeros stay zeros unless they are divided by something that is zero at pads too."""
    constant = isinstance(y, int | float) or (isinstance(y, Tensor) and y.dim() == 0)
    pads = x.pads if isinstance(x, Tokens) and constant else UNKNOWN
    return _apply(function, (x, y), kwargs, pads)


def _sum_of_two(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    place, dims = _shared((x, y))
    return _apply(function, (x, y), kwargs, AllOf(_off(x, place, dims), _off(y, place, dims)))


def _where(function: Any, condition: Any, x: Any = None, y: Any = None) -> Any:
    """Zeros at pads where the side that pads take is zero, or both are."""
    if x is None or y is None:
        raise _NotPacked
    place, dims = _shared((condition, x, y))
    left, right = _off(x, place, dims), _off(y, place, dims)
    off, on = _off(condition, place, dims), _off(condition, place, dims, inverted=True)
    pads = AnyOf(AllOf(off, right), AllOf(on, left), AllOf(left, right))
    return _apply(function, (condition, x, y), {}, pads)


def _masked_fill(function: Any, x: Any, mask: Any, value: Any) -> Any:
    place, dims = _shared((x, mask, value))
    if isinstance(value, Tokens) or (isinstance(value, Tensor) and value.dim() != 0):
        raise _NotPacked
    filled = AllOf(_off(value, place, dims), AnyOf(_off(mask, place, dims, inverted=True), _off(x, place, dims)))
    kept = AllOf(_off(mask, place, dims), _off(x, place, dims))
    return _apply(function, (x, mask, value), {}, AnyOf(filled, kept))


def _zeros_like(function: Any, x: Any, **kwargs: Any) -> Any:
    return _apply(function, (x,), kwargs, ZERO)


# ---------------------------------------------------------------------- views, casts


def _cast(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`to` and its kin: another dtype, another device."""
    if not isinstance(x, Tokens) or any(isinstance(each, Tokens) for each in (*args, *kwargs.values())):
        raise _NotPacked
    described = function(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    if not isinstance(described, Tensor):  # `type()` without an argument
        raise _NotPacked
    return x.later(
        lambda rows: function(rows, *args, **kwargs),
        place=x.place.moved(described.device),
        dtype=described.dtype,
        device=described.device,
    )


def _same(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`contiguous`, `clone`, `detach`: the same numbers."""
    if not isinstance(x, Tokens) or kwargs.get("memory_format", torch.preserve_format) not in _PLAIN_FORMATS:
        raise _NotPacked
    if function is torch.Tensor.contiguous:
        return x.later(lambda rows: rows)
    same = x.later(function)
    return replace(same, requires_grad=False) if function in _DETACH else same


_DETACH = (torch.detach, torch.Tensor.detach)
_PLAIN_FORMATS = (torch.preserve_format, torch.contiguous_format)


def _view(function: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Tokens) or x.swapped or kwargs.keys() - {"shape", "size"}:
        raise _NotPacked
    asked: Any = [*shape, *kwargs.values()]
    if len(asked) == 1 and isinstance(asked[0], Sequence | torch.Size):
        asked = asked[0]
    if not all(isinstance(size, int) for size in asked):
        raise _NotPacked
    return _reshaped(x, _resolved(asked, math.prod(x.shape)))


def _resolved(sizes: Sequence[int], count: int) -> Grid:
    known = math.prod(size for size in sizes if size != -1)
    if list(sizes).count(-1) > 1 or known == 0 or (-1 not in sizes and known != count) or count % known:
        raise _NotPacked  # eager says what is wrong
    return tuple(count // known if size == -1 else size for size in sizes)


def _reshaped(x: Tokens, shape: Grid) -> Tokens:
    place, features = x.place, math.prod(x.features)
    for grid in dict.fromkeys((place.grid, (place.size,), place.unmerged)):
        rest = None if grid is None or shape[: len(grid)] != grid else shape[len(grid) :]
        if grid is not None and rest is not None and math.prod(rest) == features:
            return x.later(partial(_with_features, rest), place=place.reshaped(grid), features=rest)
    raise _NotPacked


def _with_features(features: Grid, rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], *features)


def _flatten(function: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(x, Tokens) or x.swapped:
        raise _NotPacked
    shape, dims = x.shape, len(x.shape)
    start, end = start_dim % dims, end_dim % dims
    return _reshaped(x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


def _unsqueeze(function: Any, x: Any, dim: int) -> Any:
    if not isinstance(x, Tokens) or x.swapped:
        raise _NotPacked
    dims, tokens = len(x.shape) + 1, x.num_token_dims
    place = dim % dims
    if place < tokens:
        raise _NotPacked
    features = list(x.features)
    features.insert(place - tokens, 1)
    return x.later(lambda rows: rows.unsqueeze(place - tokens + 1), features=features)


def _squeeze(function: Any, x: Any, dim: Any = None) -> Any:
    if not isinstance(x, Tokens) or x.swapped or not isinstance(dim, int):
        raise _NotPacked
    tokens = x.num_token_dims
    place = dim % len(x.shape)
    if place < tokens:
        raise _NotPacked
    if x.shape[place] != 1:
        return x.later(lambda rows: rows)
    features = [size for number, size in enumerate(x.features) if number != place - tokens]
    return x.later(lambda rows: rows.squeeze(place - tokens + 1), features=features)


def _transpose(function: Any, x: Any, dim0: int = 0, dim1: int = 1) -> Any:
    """(rows, positions, features) to (rows, features, positions) and back; or features among themselves."""
    if not isinstance(x, Tokens) or x.num_token_dims != 2:
        raise _NotPacked
    dims = len(x.shape)
    first, second = sorted((dim0 % dims, dim1 % dims))
    if (first, second) == (1, 2) and dims == 3:
        return replace(x.later(lambda rows: rows), swapped=not x.swapped)
    if x.swapped or first < 2:
        raise _NotPacked
    features = list(x.features)
    features[first - 2], features[second - 2] = features[second - 2], features[first - 2]
    return x.later(lambda rows: rows.transpose(first - 1, second - 1), features=features)


def _permute(function: Any, x: Any, *dims: Any) -> Any:
    order: Any = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if isinstance(x, Tokens) and len(x.shape) == 3 and tuple(each % 3 for each in order) == (0, 2, 1):
        return _transpose(function, x, 1, 2)
    raise _NotPacked


# ---------------------------------------------------------------------- parts


def _getitem(function: Any, x: Any, key: Any) -> Any:
    """Slices of rows, of positions and of features; tokens by a mask; one position of each row."""
    if not isinstance(x, Tokens) or x.swapped:
        raise _NotPacked
    if isinstance(key, Tensor | Tokens) and key.dtype is torch.bool:
        return _masked(x, key)
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(each, Tensor | Tokens | Sequence) for each in keys):
        return _picked_by_index(x, keys)
    if not all(isinstance(each, int | slice | EllipsisType) for each in keys) or any(
        isinstance(each, bool) for each in keys
    ):
        raise _NotPacked
    if keys.count(Ellipsis) > 1 or len(keys) - keys.count(Ellipsis) > len(x.shape):
        raise _NotPacked
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [slice(None)] * (len(x.shape) - len(keys))
    of_tokens, of_features = keys[: x.num_token_dims], keys[x.num_token_dims :]
    if x.num_token_dims == 2 and isinstance(of_tokens[1], int):
        return _picked_column(x, of_tokens, of_features)
    for dim, each in enumerate(of_tokens):
        x = _cut(x, dim, each)
    if all(each == slice(None) for each in of_features):
        return x
    inside = (slice(None), *of_features)
    features = torch.empty(x.features, device="meta")[tuple(of_features)].shape
    return x.later(lambda rows: rows[inside], features=features)


def _cut(x: Tokens, dim: int, key: Any) -> Tokens:
    """`x` with `key` applied to one of its token dimensions."""
    if not isinstance(key, slice) or not all(each is None or isinstance(each, int) for each in (key.start, key.stop)):
        raise _NotPacked
    start, stop, step = key.indices(x.place.grid[dim])
    if step != 1 or stop <= start:
        raise _NotPacked
    place, kept = x.place.sliced(dim, start, stop)
    if place is x.place:
        return x
    if place.count == 0:
        raise _NotPacked
    assert kept is not None
    return x.later(lambda rows: rows.index_select(0, kept), place=place)


def _masked(x: Tokens, mask: Tensor | Tokens) -> Tensor:
    """`x[mask]` where the mask is off at pads: (true, *features)."""
    place = x.place
    if isinstance(mask, Tokens):
        if mask.features or mask.swapped or not mask.place.is_like(place) or not mask.pads.are_zero():
            raise _NotPacked
        return x.rows()[mask.rows()]
    if tuple(mask.shape) != place.grid or not place.is_off_at_pads(mask):
        raise _NotPacked
    return x.rows()[place.take(mask)]


def _masked_select(function: Any, x: Any, mask: Any) -> Any:
    if not isinstance(x, Tokens) or x.swapped or x.features or not isinstance(mask, Tensor | Tokens):
        raise _NotPacked
    return _masked(x, mask)


def _picked_column(x: Tokens, of_tokens: Sequence[Any], of_features: Sequence[Any]) -> Tensor:
    """`x[:, 0]`: one position of every row, a token in each."""
    rows, positions = x.place.grid
    column = of_tokens[1]
    if of_tokens[0] != slice(None) or not -positions <= column < positions:
        raise _NotPacked
    wanted = torch.arange(rows, device=x.place.at.device) * positions + column % positions
    return _picked(x, wanted, of_features)


def _picked_by_index(x: Tokens, keys: Sequence[Any]) -> Tensor:
    """`x[rows, positions]`: positions that are tokens, by their indices."""
    if x.num_token_dims != 2 or len(keys) < 2:
        raise _NotPacked
    device, grid = x.place.at.device, x.place.grid
    indices = []
    for key, size in zip(keys[:2], grid, strict=True):
        index = torch.as_tensor(list(key), device=device) if isinstance(key, range | list) else key
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() > 1:
            raise _NotPacked
        if index.device != device or bool(((index < -size) | (index >= size)).any()):
            raise _NotPacked  # eager says what is wrong
        indices.append(index.long() % size)
    rest = list(keys[2:])
    if not all(isinstance(each, slice) for each in rest):
        raise _NotPacked
    rows, columns = torch.broadcast_tensors(*indices)
    if rows.dim() != 1:
        raise _NotPacked
    return _picked(x, rows * grid[1] + columns, rest)


def _picked(x: Tokens, positions: Tensor, of_features: Sequence[Any]) -> Tensor:
    entries = x.place.entries_at(positions)
    if entries is None:
        raise _NotPacked
    return x.rows()[entries][(slice(None), *of_features)]


def _narrow(function: Any, x: Any, dim: int, start: Any, length: int) -> Any:
    if not isinstance(x, Tokens) or not isinstance(start, int) or x.swapped:
        raise _NotPacked
    dim = dim % len(x.shape)
    start = start % x.shape[dim] if start < 0 else start
    return _getitem(function, x, (*[slice(None)] * dim, slice(start, start + length)))


def _split(function: Any, x: Any, size: Any, dim: int = 0) -> Any:
    if not isinstance(x, Tokens) or x.swapped:
        raise _NotPacked
    dim = dim % len(x.shape)
    whole = x.shape[dim]
    sizes = size if isinstance(size, Sequence) else [size] * -(-whole // size) if isinstance(size, int) else None
    if sizes is None or (isinstance(size, Sequence) and sum(size) != whole):
        raise _NotPacked
    return _pieces(x, sizes, dim)


def _chunk(function: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    if not isinstance(x, Tokens) or x.swapped or chunks < 1:
        raise _NotPacked
    whole = x.shape[dim % len(x.shape)]
    return _split(function, x, max(1, -(-whole // chunks)), dim)


def _pieces(x: Tokens, sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    pieces, start = [], 0
    for size in sizes:
        stop = min(start + size, x.shape[dim])
        pieces.append(_getitem(None, x, (*[slice(None)] * dim, slice(start, stop))))
        start = stop
    return tuple(pieces)


def _cat(function: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Concatenation along features; or, along positions, of all the parts that one value was split into."""
    dim = kwargs.pop("axis", dim)
    if kwargs or not all(isinstance(each, Tokens) and not each.swapped for each in tensors):
        raise _NotPacked
    first: Tokens = tensors[0]
    tokens, dims = first.num_token_dims, len(first.shape)
    if any(len(each.shape) != dims for each in tensors):
        raise _NotPacked
    dim = dim % dims
    if dim >= tokens:
        place, _ = _shared(tensors)
        return Tokens.of(place, torch.cat([each.rows() for each in tensors], dim - tokens + 1))
    if tokens != 1 or any(each.features != first.features for each in tensors):
        raise _NotPacked
    if len(tensors) == 1:
        return first
    whole, reached = None, 0
    for each in tensors:
        part = each.place.cut_from
        if part is None or part[1] != reached or (whole is not None and part[0] is not whole):
            raise _NotPacked
        whole, reached = part[0], part[2]
    if whole is None or reached != whole.size:
        raise _NotPacked
    return Tokens.of(whole, torch.cat([each.rows() for each in tensors]), AllOf(*(each.pads for each in tensors)))


# ---------------------------------------------------------------------- over features, and sums over zeros


def _over_features(
    name: str, function: Any, *args: Any, place: int = 1, default: Any = None, zeros: bool = False, **kwargs: Any
) -> Any:
    """A function along dimensions of features. name: of the argument that holds them, the `place`-th."""
    x = args[0] if args else kwargs.pop("input", None)
    given = list(args[1:])
    if not isinstance(x, Tokens) or x.swapped:
        raise _NotPacked
    if len(given) >= place:
        dim = given[place - 1]
    else:
        dim = kwargs.get(name, default)
    if dim is None:
        raise _NotPacked
    dims = [dim] if isinstance(dim, int) else list(dim)
    tokens, count = x.num_token_dims, len(x.shape)
    if not dims or not all(isinstance(each, int) and not isinstance(each, bool) for each in dims):
        raise _NotPacked
    if any(not -count <= each < count or each % count < tokens for each in dims):
        raise _NotPacked
    moved = [each % count - tokens + 1 for each in dims]
    inside: Any = moved[0] if isinstance(dim, int) else moved
    others = [each for each in (*given, *kwargs.values()) if isinstance(each, Tensor | Tokens)]
    if others:
        raise _NotPacked
    if len(given) >= place:
        given[place - 1] = inside
    else:
        kwargs[name] = inside
    made = function(x.rows(), *given, **kwargs)
    pads = x.pads if zeros else UNKNOWN
    if isinstance(made, Tensor):
        return Tokens.of(x.place, made, pads)
    results = [Tokens.of(x.place, each, pads) for each in made]
    return results if isinstance(made, list) else Several(type(made), results)


class Several:
    """What a function returns that gives several tensors under names, such as `max`."""

    def __init__(self, kind: type, items: Sequence[Any]) -> None:
        self.kind, self.items = kind, items


def _extreme(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`max` and `min`: over features, or of two values."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor | Tokens):
        return _pointwise(function, x, *args, **kwargs)
    return _over_features("dim", function, x, *args, **kwargs)


def _softmax(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return _over_features("dim", function, x, *args, **kwargs)


def _gather(function: Any, x: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Along features, at indices that are one of each token."""
    place, dims = _shared((x, index))
    if not isinstance(x, Tokens) or not isinstance(dim, int) or dim % dims < x.num_token_dims or kwargs:
        raise _NotPacked
    if isinstance(index, Tensor) and (index.dim() != dims or tuple(index.shape[: x.num_token_dims]) != place.grid):
        raise _NotPacked
    inside = _aligned(index, place, dims)
    if any(own < asked for own, asked in zip(x.features, inside.shape[1:], strict=True)) and len(x.features) > 1:
        raise _NotPacked
    return Tokens.of(place, function(x.rows(), dim % dims - x.num_token_dims + 1, inside))


def _take_along(function: Any, x: Any, index: Any, dim: Any = None) -> Any:
    return _gather(torch.gather, x, dim, index)


def _sum(function: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    """Sums and means; over positions where pads are zeros."""
    dim = kwargs.pop("axis", dim)
    if not isinstance(x, Tokens) or x.swapped or kwargs:
        raise _NotPacked
    tokens, count = x.num_token_dims, len(x.shape)
    whole = dim is None or (isinstance(dim, Sequence) and not dim)
    dims = list(range(count)) if whole else [dim] if isinstance(dim, int) else list(dim)
    if any(not isinstance(each, int) or not -count <= each < count for each in dims):
        raise _NotPacked
    dims = [each % count for each in dims]
    of_tokens = [each for each in dims if each < tokens]
    of_features = [each - tokens + 1 for each in dims if each >= tokens]
    mean = function in _MEANS
    if mean and dtype is None and not x.dtype.is_floating_point:
        raise _NotPacked
    if not of_tokens:
        over = torch.mean if mean else torch.sum
        return Tokens.of(x.place, over(x.rows(), of_features, keepdim, dtype=dtype), x.pads)
    if not x.pads.are_zero():
        raise _NotPacked
    rows = x.rows()
    kind = dtype or (rows.dtype if rows.dtype.is_floating_point or rows.dtype.is_complex else torch.int64)
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind  # sums of halves are kept in float32
    if len(of_tokens) == tokens:
        total = torch.sum(rows, [0, *of_features], dtype=wide)
        if keepdim:
            total = total.reshape([1 if number in dims else size for number, size in enumerate(x.shape)])
    else:
        summed = torch.sum(rows, of_features, keepdim, dtype=wide) if of_features else rows.to(wide)
        kept = 1 - of_tokens[0]
        along = x.place.coordinates()[kept]
        total = summed.new_zeros(x.place.grid[kept], *summed.shape[1:]).index_add(0, along, summed)
        total = total.unsqueeze(of_tokens[0]) if keepdim else total
    if mean:
        total = total / math.prod(x.shape[each] for each in dims)
    return total.to(kind)


_MEANS = (torch.mean, torch.Tensor.mean)


def _any(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Whether anything is true or not zero."""
    if args or kwargs:
        return _over_features("dim", function, x, *args, **kwargs)
    if not isinstance(x, Tokens) or x.swapped or not x.pads.are_zero():
        raise _NotPacked
    return function(x.rows())


def _count_nonzero(function: Any, x: Any, dim: Any = None) -> Any:
    if not isinstance(x, Tokens) or x.swapped or dim is not None or not x.pads.are_zero():
        raise _NotPacked
    return function(x.rows())


# ---------------------------------------------------------------------- layers and losses


def _linear(function: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(input, Tokens) or input.swapped or not input.features:
        raise _NotPacked
    if isinstance(weight, Tokens) or isinstance(bias, Tokens):
        raise _NotPacked
    return Tokens.of(input.place, function(input.rows(), weight, bias))


def _matmul(function: Any, x: Any, y: Any) -> Any:
    if not isinstance(x, Tokens) or x.swapped or len(x.features) != 1 or not isinstance(y, Tensor) or y.dim() != 2:
        raise _NotPacked
    return Tokens.of(x.place, function(x.rows(), y))


def _norm_layer(function: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Tokens) or input.swapped or len(normalized_shape) > len(input.features):
        raise _NotPacked
    if any(isinstance(each, Tokens) for each in (*args, *kwargs.values())):
        raise _NotPacked
    return Tokens.of(input.place, function(input.rows(), normalized_shape, *args, **kwargs))


def _dropout(function: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Nothing to draw: the identity. Where there is, the padded value is, so that the draws are eager's."""
    if not isinstance(input, Tokens) or inplace or (training and p > 0):
        raise _NotPacked
    return input.later(lambda rows: rows)


def _normalize(function: Any, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return _over_features("dim", function, input, p, dim, eps, place=2)


def _norm(function: Any, input: Any, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _over_features("dim", function, input, p, dim, *args, place=2, **kwargs)


def _vector_norm(function: Any, x: Any, ord: Any = 2, dim: Any = None, **kwargs: Any) -> Any:
    return _over_features("dim", function, x, ord, dim, place=2, **kwargs)


def _similarity(function: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    place, dims = _shared((x1, x2))
    if dim % dims < len(place.grid):
        raise _NotPacked
    inside = dim % dims - len(place.grid) + 1
    return Tokens.of(place, function(_aligned(x1, place, dims), _aligned(x2, place, dims), inside, eps))


def _cross_entropy(
    function: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """With one label a position, ignored at every pad."""
    more = {} if function is F.nll_loss else {"label_smoothing": label_smoothing}
    if not isinstance(input, Tokens) or not isinstance(target, Tensor) or target.is_floating_point():
        raise _NotPacked
    place = input.place
    if len(input.features) != 1 or input.swapped != (len(place.grid) == 2) or tuple(target.shape) != place.grid:
        raise _NotPacked
    if isinstance(weight, Tokens) or size_average is not None or reduce is not None:
        raise _NotPacked
    counts = target != ignore_index
    labels = place.take(target)
    if reduction == "none":
        rows = function(input.rows(), labels, weight, ignore_index=ignore_index, reduction=reduction, **more)
        return Tokens.of(place, rows, OffBy(place, lambda: counts, counts))
    if not place.is_off_at_pads(counts):
        raise _NotPacked
    return function(input.rows(), labels, weight, ignore_index=ignore_index, reduction=reduction, **more)


def _elementwise_loss(function: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of every entry for itself, not reduced."""
    if args:
        bound = inspect.signature(function).bind(input, target, *args, **kwargs)
        kwargs = {name: each for name, each in bound.arguments.items() if name not in ("input", "target")}
    if kwargs.get("reduction", "mean") != "none" or kwargs.get("reduce") is not None:
        raise _NotPacked
    if kwargs.get("size_average") is not None:
        raise _NotPacked
    _shared((input, target))
    shapes = [tuple(each.shape) for each in (input, target)]
    if shapes[0] != shapes[1]:
        raise _NotPacked
    return _apply(function, (input, target), kwargs, UNKNOWN)


def with_masked(x: Tensor, key: Tensor, value: float) -> Tensor:
    """What `x[key] = value` makes of `x`."""
    changed = x.clone()
    changed[key] = value
    return changed


def _masked_set(function: Any, x: Any, key: Any, value: Any) -> Any:
    """What `x[key] = value` makes of `x`, for a mask of positions and a number."""
    if not isinstance(x, Tokens) or x.swapped or not isinstance(key, Tensor) or key.dtype is not torch.bool:
        raise _NotPacked
    if tuple(key.shape) != x.place.grid or not isinstance(value, int | float):
        raise _NotPacked
    wide = key.reshape(*key.shape, *[1] * len(x.features))
    return _masked_fill(torch.masked_fill, x, wide, value)


def _named(*names: str) -> list[Any]:
    """The functions of these names, of torch, of its tensors and of `torch.nn.functional`."""
    found = []
    for name in names:
        for home in (torch, torch.Tensor, F, torch.special):
            function = getattr(home, name, None)
            if callable(function):
                found.append(function)
    return found


_KEEP_ZEROS = (
    "neg", "negative", "abs", "absolute", "relu", "tanh", "square", "sign", "sin", "expm1", "log1p", "gelu",
    "silu", "leaky_relu", "elu", "softsign", "nan_to_num", "erf", "arctan", "floor", "ceil", "round", "trunc",
    "__neg__", "__abs__",
)  # fmt: skip
_POINTWISE = (
    "exp", "exp2", "log", "log2", "log10", "sigmoid", "logsigmoid", "softplus", "reciprocal", "rsqrt", "cos", "clamp",
    "clip", "clamp_min", "clamp_max", "pow", "__pow__", "__rpow__", "logit", "logical_not", "__invert__",
    "bitwise_not", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "maximum", "minimum", "logical_xor", "logaddexp", "xlogy", "remainder",
    "fmod", "floor_divide", "ones_like", "hardtanh", "mish", "selu", "celu", "relu6", "hardswish", "lerp",
    "addcmul", "addcdiv",
)  # fmt: skip

CASTS = frozenset(
    _named("to", "float", "double", "half", "bfloat16", "type", "type_as", "int", "long", "bool", "cpu", "cuda")
)

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(_named(*_POINTWISE), _pointwise),
    **dict.fromkeys(_named(*_KEEP_ZEROS), _keeps_zeros),
    **dict.fromkeys(
        _named(
            "mul", "multiply", "__mul__", "__rmul__", "logical_and", "bitwise_and", "__and__", "__rand__"
        ),
        _product,
    ),
    **dict.fromkeys(_named("div", "divide", "true_divide", "__truediv__"), _quotient),
    **dict.fromkeys(_named("__rtruediv__", "__rsub__"), _pointwise),
    **dict.fromkeys(
        _named("add", "sub", "subtract", "__add__", "__radd__", "__sub__", "logical_or", "bitwise_or", "__or__"),
        _sum_of_two,
    ),
    **dict.fromkeys(_named("masked_fill"), _masked_fill),
    torch.zeros_like: _zeros_like,
    torch.where: _where,
    torch.Tensor.where: lambda function, x, condition, y: _where(torch.where, condition, x, y),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(_named("contiguous", "clone", "detach"), _same),
    **dict.fromkeys(_named("view", "reshape"), _view),
    **dict.fromkeys(_named("flatten"), _flatten),
    **dict.fromkeys(_named("unsqueeze"), _unsqueeze),
    **dict.fromkeys(_named("squeeze"), _squeeze),
    **dict.fromkeys(_named("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(_named("permute"), _permute),
    getattr(torch.Tensor.mT, "__get__"): lambda function, x: _transpose(function, x, -2, -1),  # noqa: B009
    torch.Tensor.__getitem__: _getitem,
    **dict.fromkeys(_named("narrow"), _narrow),
    **dict.fromkeys(_named("split"), _split),
    **dict.fromkeys(_named("chunk"), _chunk),
    **dict.fromkeys(_named("masked_select"), _masked_select),
    **dict.fromkeys(_named("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(_named("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(
        _named("logsumexp", "argmax", "argmin", "amax", "amin", "cumsum", "cumprod", "var", "std", "prod", "glu"),
        partial(_over_features, "dim"),
    ),
    **dict.fromkeys(_named("argsort", "sort"), partial(_over_features, "dim", default=-1)),
    **dict.fromkeys(_named("topk"), partial(_over_features, "dim", place=2, default=-1)),
    **dict.fromkeys(_named("max", "min"), _extreme),
    **dict.fromkeys(_named("gather"), _gather),
    **dict.fromkeys(_named("take_along_dim"), _take_along),
    **dict.fromkeys(_named("sum", "mean"), _sum),
    **dict.fromkeys(_named("any"), _any),
    **dict.fromkeys(_named("count_nonzero"), _count_nonzero),
    **dict.fromkeys(_named("norm"), _norm),
    torch.linalg.vector_norm: _vector_norm,
    F.linear: _linear,
    **dict.fromkeys(_named("matmul", "__matmul__"), _matmul),
    F.layer_norm: _norm_layer,
    F.rms_norm: _norm_layer,
    F.dropout: _dropout,
    F.normalize: _normalize,
    F.cosine_similarity: _similarity,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: lambda function, *args, **kwargs: _cross_entropy(function, *args, **kwargs),
    **dict.fromkeys(
        (
            F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
        ),
        _elementwise_loss,
    ),
    with_masked: _masked_set,
}  # fmt: skip

# Functions that change their first argument: what they make of it, as a new value.
OUT_OF_PLACE: dict[Any, Any] = {
    torch.Tensor.__setitem__: with_masked,
    torch.Tensor.masked_fill_: torch.Tensor.masked_fill,
    torch.Tensor.mul_: torch.Tensor.mul,
    torch.Tensor.__imul__: torch.Tensor.mul,
    torch.Tensor.div_: torch.Tensor.div,
    torch.Tensor.__itruediv__: torch.Tensor.div,
    torch.Tensor.add_: torch.Tensor.add,
    torch.Tensor.__iadd__: torch.Tensor.add,
    torch.Tensor.sub_: torch.Tensor.sub,
    torch.Tensor.__isub__: torch.Tensor.sub,
}
# Functions whose result may share memory with their argument: a write into one would be seen in the other.
VIEWS = CASTS | frozenset(
    _named(
        "contiguous", "detach", "view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "swapaxes",
        "permute", "narrow", "split", "chunk",
    )
) | {torch.Tensor.__getitem__, getattr(torch.Tensor.mT, "__get__"), F.dropout}  # noqa: B009  # fmt: skip
