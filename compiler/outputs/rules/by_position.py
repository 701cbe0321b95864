"""Functions that work position by position: arithmetic, comparisons, activations, `where`, `masked_fill`.

Each knows whether its result is zero at pads, from what is known of its operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.outputs.rules.operands import NotPacked, apply, off, shared
from deepytorch.compiler.outputs.tokens import UNKNOWN, ZERO, AllOf, AnyOf, Tokens


def pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Position by position; what comes of zeros is not known."""
    return apply(function, args, kwargs, UNKNOWN)


def keeps_zeros(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """f(0) = 0, whatever the other arguments are."""
    if not isinstance(x, Tokens) or any(isinstance(each, Tokens | Tensor) for each in (*args, *kwargs.values())):
        return pointwise(function, x, *args, **kwargs)
    return apply(function, (x, *args), kwargs, x.pads)


def product(function: Any, x: Any, y: Any) -> Any:
    """Zeros at pads where one factor is."""
    place, dims = shared((x, y))
    return apply(function, (x, y), {}, AnyOf(off(x, place, dims), off(y, place, dims)))


def quotient(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """Zeros stay zeros unless they are divided by something that is zero at pads too."""
    constant = isinstance(y, int | float) or (isinstance(y, Tensor) and y.dim() == 0)
    pads = x.pads if isinstance(x, Tokens) and constant else UNKNOWN
    return apply(function, (x, y), kwargs, pads)


def sum_of_two(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """Zeros at pads where both are."""
    place, dims = shared((x, y))
    return apply(function, (x, y), kwargs, AllOf(off(x, place, dims), off(y, place, dims)))


def where(function: Any, condition: Any, x: Any = None, y: Any = None) -> Any:
    """Zeros at pads where the side that pads take is zero, or both are."""
    if x is None or y is None:
        raise NotPacked
    place, dims = shared((condition, x, y))
    left, right = off(x, place, dims), off(y, place, dims)
    no, yes = off(condition, place, dims), off(condition, place, dims, inverted=True)
    pads = AnyOf(AllOf(no, right), AllOf(yes, left), AllOf(left, right))
    return apply(function, (condition, x, y), {}, pads)


def masked_fill(function: Any, x: Any, mask: Any, value: Any) -> Any:
    """Zeros at pads where they are filled with zeros, or keep theirs."""
    place, dims = shared((x, mask, value))
    if isinstance(value, Tokens) or (isinstance(value, Tensor) and value.dim() != 0):
        raise NotPacked
    filled = AllOf(off(value, place, dims), AnyOf(off(mask, place, dims, inverted=True), off(x, place, dims)))
    kept = AllOf(off(mask, place, dims), off(x, place, dims))
    return apply(function, (x, mask, value), {}, AnyOf(filled, kept))


def zeros_like(function: Any, x: Any, **kwargs: Any) -> Any:
    """Zeros everywhere."""
    return apply(function, (x,), kwargs, ZERO)


def with_masked(x: Tensor, key: Tensor, value: float) -> Tensor:
    """What `x[key] = value` makes of `x`."""
    changed = x.clone()
    changed[key] = value
    return changed


def masked_set(function: Any, x: Any, key: Any, value: Any) -> Any:
    """What `x[key] = value` makes of `x`, for a mask of positions and a number."""
    if not isinstance(x, Tokens) or x.swapped or not isinstance(key, Tensor) or key.dtype is not torch.bool:
        raise NotPacked
    if tuple(key.shape) != x.place.grid or not isinstance(value, int | float):
        raise NotPacked
    wide = key.reshape(*key.shape, *[1] * len(x.features))
    return masked_fill(torch.masked_fill, x, wide, value)
