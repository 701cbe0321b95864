"""Sums, means and counts: over features always, over positions only if pads are zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepytorch.compiler.step.outputs.rules.by_feature import over_features
from deepytorch.compiler.step.outputs.rules.operands import NotPacked
from deepytorch.compiler.step.outputs.tokens import Tokens


def sum_or_mean(
    function: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Sum or average; over positions only if pads are zeros."""
    dim = kwargs.pop("axis", dim)
    if not isinstance(x, Tokens) or x.swapped or kwargs:
        raise NotPacked
    tokens, count = x.num_token_dims, len(x.shape)
    whole = dim is None or (isinstance(dim, Sequence) and not dim)
    dims = list(range(count)) if whole else [dim] if isinstance(dim, int) else list(dim)
    if any(not isinstance(each, int) or not -count <= each < count for each in dims):
        raise NotPacked
    dims = [each % count for each in dims]
    of_tokens = [each for each in dims if each < tokens]
    of_features = [each - tokens + 1 for each in dims if each >= tokens]
    mean = function in _MEANS
    if mean and dtype is None and not x.dtype.is_floating_point:
        raise NotPacked
    if not of_tokens:
        over = torch.mean if mean else torch.sum
        return Tokens.of(x.place, over(x.rows(), of_features, keepdim, dtype=dtype), x.pads)
    if not x.pads.are_zero():
        raise NotPacked
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


def any_true(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `any`: over features, or over everything if pads are zeros."""
    if args or kwargs:
        return over_features("dim", function, x, *args, **kwargs)
    if not isinstance(x, Tokens) or x.swapped or not x.pads.are_zero():
        raise NotPacked
    return function(x.rows())


def count_nonzero(function: Any, x: Any, dim: Any = None) -> Any:
    """Count nonzero values over everything, if pads are zeros."""
    if not isinstance(x, Tokens) or x.swapped or dim is not None or not x.pads.are_zero():
        raise NotPacked
    return function(x.rows())
