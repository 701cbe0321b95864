"""Functions that give the same numbers in another shape, dtype or order: deferred until somebody uses the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.step.outputs.rules.operands import NotPacked
from deepytorch.compiler.step.outputs.tokens import Grid, Tokens


def cast(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert to another dtype or device: `to` and its kin."""
    if not isinstance(x, Tokens) or any(isinstance(each, Tokens) for each in (*args, *kwargs.values())):
        raise NotPacked
    described = function(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    if not isinstance(described, Tensor):  # `type()` without an argument
        raise NotPacked
    return x.later(
        lambda rows: function(rows, *args, **kwargs),
        place=x.place.moved(described.device),
        dtype=described.dtype,
        device=described.device,
    )


def same_numbers(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `contiguous`, `clone` or `detach`, which keep the numbers."""
    if not isinstance(x, Tokens) or kwargs.get("memory_format", torch.preserve_format) not in _PLAIN_FORMATS:
        raise NotPacked
    if function is torch.Tensor.contiguous:
        return x.later(lambda rows: rows)
    same = x.later(function)
    return replace(same, requires_grad=False) if function in _DETACH else same


_DETACH = (torch.detach, torch.Tensor.detach)


_PLAIN_FORMATS = (torch.preserve_format, torch.contiguous_format)


def view(function: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    """Reshape features; token dimensions are kept, merged or split again."""
    if not isinstance(x, Tokens) or x.swapped or kwargs.keys() - {"shape", "size"}:
        raise NotPacked
    asked: Any = [*shape, *kwargs.values()]
    if len(asked) == 1 and isinstance(asked[0], Sequence | torch.Size):
        asked = asked[0]
    if not all(isinstance(size, int) for size in asked):
        raise NotPacked
    return _reshaped(x, _resolved(asked, math.prod(x.shape)))


def _resolved(sizes: Sequence[int], count: int) -> Grid:
    known = math.prod(size for size in sizes if size != -1)
    if list(sizes).count(-1) > 1 or known == 0 or (-1 not in sizes and known != count) or count % known:
        raise NotPacked  # eager says what is wrong
    return tuple(count // known if size == -1 else size for size in sizes)


def _reshaped(x: Tokens, shape: Grid) -> Tokens:
    place, features = x.place, math.prod(x.features)
    for grid in dict.fromkeys((place.grid, (place.size,), place.unmerged)):
        rest = None if grid is None or shape[: len(grid)] != grid else shape[len(grid) :]
        if grid is not None and rest is not None and math.prod(rest) == features:
            return x.later(partial(_with_features, rest), place=place.reshaped(grid), features=rest)
    raise NotPacked


def _with_features(features: Grid, rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], *features)


def flatten(function: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge token dimensions, or features."""
    if not isinstance(x, Tokens) or x.swapped:
        raise NotPacked
    shape, dims = x.shape, len(x.shape)
    start, end = start_dim % dims, end_dim % dims
    return _reshaped(x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


def unsqueeze(function: Any, x: Any, dim: int) -> Any:
    """Insert a dimension of size 1 among the features."""
    if not isinstance(x, Tokens) or x.swapped:
        raise NotPacked
    dims, tokens = len(x.shape) + 1, x.num_token_dims
    place = dim % dims
    if place < tokens:
        raise NotPacked
    features = list(x.features)
    features.insert(place - tokens, 1)
    return x.later(lambda rows: rows.unsqueeze(place - tokens + 1), features=features)


def squeeze(function: Any, x: Any, dim: Any = None) -> Any:
    """Remove a dimension of size 1 among the features."""
    if not isinstance(x, Tokens) or x.swapped or not isinstance(dim, int):
        raise NotPacked
    tokens = x.num_token_dims
    place = dim % len(x.shape)
    if place < tokens:
        raise NotPacked
    if x.shape[place] != 1:
        return x.later(lambda rows: rows)
    features = [size for number, size in enumerate(x.features) if number != place - tokens]
    return x.later(lambda rows: rows.squeeze(place - tokens + 1), features=features)


def transpose(function: Any, x: Any, dim0: int = 0, dim1: int = 1) -> Any:
    """Turn (rows, positions, features) into (rows, features, positions) or back, or swap dimensions of features."""
    if not isinstance(x, Tokens) or x.num_token_dims != 2:
        raise NotPacked
    dims = len(x.shape)
    first, second = sorted((dim0 % dims, dim1 % dims))
    if (first, second) == (1, 2) and dims == 3:
        return replace(x.later(lambda rows: rows), swapped=not x.swapped)
    if x.swapped or first < 2:
        raise NotPacked
    features = list(x.features)
    features[first - 2], features[second - 2] = features[second - 2], features[first - 2]
    return x.later(lambda rows: rows.transpose(first - 1, second - 1), features=features)


def permute(function: Any, x: Any, *dims: Any) -> Any:
    """Apply the one permutation that a loss needs: see `transpose`."""
    order: Any = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if isinstance(x, Tokens) and len(x.shape) == 3 and tuple(each % 3 for each in order) == (0, 2, 1):
        return transpose(function, x, 1, 2)
    raise NotPacked
