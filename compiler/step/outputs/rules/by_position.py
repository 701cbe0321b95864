"""Functions that work position by position: arithmetic, comparisons, activations, `where`, `masked_fill`.

From the conditions on its operands each one derives two conditions on its result: zero at pads, and finite at pads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.step.outputs.rules.operands import NotPacked, all_finite, apply, divides, finite, off, shared
from deepytorch.compiler.step.outputs.tokens import UNSURE, ZERO, Condition, Pads, Tokens, all_of, any_of, never


def pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function position by position. The result is finite if the arguments are; zeros need not stay zeros."""
    return _of_all(function, args, kwargs)


def singular(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that is infinite or NaN for some finite numbers, so that nothing is known of its pads."""
    return apply(function, args, kwargs, UNSURE)


def exponential(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an exponential. The result is finite if the argument is, but not in half precision: e**12 is too large."""
    made = _of_all(function, args, kwargs)
    return replace(made, pads=UNSURE) if made.dtype == torch.float16 else made


def power(function: Any, base: Any, exponent: Any) -> Any:
    """Raise packed values to a natural number, or a number above zero to packed values."""
    if isinstance(exponent, int | float) and exponent >= 0 and exponent == int(exponent):
        return _of_all(function, (base, exponent), {})
    if isinstance(base, int | float) and base > 0:
        return exponential(function, base, exponent)
    return singular(function, base, exponent)


def reflected_power(function: Any, exponent: Any, base: Any) -> Any:
    """Compute `base ** exponent`, with the arguments in the other order."""
    return power(lambda base, exponent: function(exponent, base), base, exponent)


def _of_all(function: Any, args: Any, kwargs: Any, x: Tokens | None = None) -> Any:
    """Apply a function whose result is finite at pads if all arguments are. x: the argument whose zeros stay zeros."""
    operands = [*args, *kwargs.values()]
    place, dims = shared(operands)
    zero = never if x is None else x.pads.zero
    return apply(function, args, kwargs, Pads(zero, any_of(zero, all_finite(operands, place, dims))))


def keeps_zeros(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function with f(0) = 0, whatever the other arguments are. The result is finite if `x` is."""
    if not isinstance(x, Tokens) or any(isinstance(each, Tokens | Tensor) for each in (*args, *kwargs.values())):
        return pointwise(function, x, *args, **kwargs)
    return _of_all(function, (x, *args), kwargs, x)


def keeps_zeros_only(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function with f(0) = 0 that is not finite for some other numbers."""
    return apply(function, (x, *args), kwargs, Pads(x.pads.zero, x.pads.zero))


def keeps_zeros_else_exponential(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function with f(0) = 0 that is large if `x` is: `expm1`."""
    made = keeps_zeros(function, x, *args, **kwargs)
    return replace(made, pads=Pads(x.pads.zero, x.pads.zero)) if made.dtype == torch.float16 else made


def made_finite(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `nan_to_num`, which replaces values that are not finite."""
    place, dims = shared((x,))
    return apply(function, (x, *args), kwargs, Pads(x.pads.zero, all_finite([*args, *kwargs.values()], place, dims)))


def product(function: Any, x: Any, y: Any) -> Any:
    """Multiply. The product is zero at pads if one factor is, and the other is finite: zero times infinity is NaN."""
    place, dims = shared((x, y))
    left, right = finite(x, place, dims), finite(y, place, dims)
    zero = any_of(all_of(off(x, place, dims), right), all_of(off(y, place, dims), left))
    return apply(function, (x, y), {}, Pads(zero, any_of(zero, all_of(left, right))))


def quotient(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """Divide. Zeros stay zeros, and finite values stay finite, unless they are divided by zero."""
    place, dims = shared((x, y))
    by = divides(y, place, dims)
    zero = all_of(x.pads.zero, by) if isinstance(x, Tokens) else never
    return apply(function, (x, y), kwargs, Pads(zero, any_of(zero, all_of(finite(x, place, dims), by))))


def sum_of_two(function: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """Add or subtract. The result is zero at pads if both operands are."""
    place, dims = shared((x, y))
    scale = all_finite([*kwargs.values()], place, dims)
    zero = all_of(scale, off(x, place, dims), off(y, place, dims))
    return apply(function, (x, y), kwargs, Pads(zero, any_of(zero, all_of(scale, all_finite((x, y), place, dims)))))


def where(function: Any, condition: Any, x: Any = None, y: Any = None) -> Any:
    """Apply `where`. The result is zero at pads if the side that pads take is zero, or both are; finite likewise."""
    if x is None or y is None:
        raise NotPacked
    place, dims = shared((condition, x, y))
    no, yes = off(condition, place, dims), off(condition, place, dims, inverted=True)

    def holds(left: Condition, right: Condition) -> Condition:
        return any_of(all_of(left, right), all_of(no, right), all_of(yes, left))

    zero = holds(off(x, place, dims), off(y, place, dims))
    return apply(
        function, (condition, x, y), {}, Pads(zero, any_of(zero, holds(finite(x, place, dims), finite(y, place, dims))))
    )


def masked_fill(function: Any, x: Any, mask: Any, value: Any) -> Any:
    """Apply `masked_fill`. The result is zero at pads that are filled with zeros or keep theirs; finite likewise."""
    place, dims = shared((x, mask, value))
    if isinstance(value, Tokens) or (isinstance(value, Tensor) and value.dim() != 0):
        raise NotPacked
    kept, filled = off(mask, place, dims), off(mask, place, dims, inverted=True)

    def holds(new: Condition, old: Condition) -> Condition:
        return any_of(all_of(new, old), all_of(new, filled), all_of(old, kept))

    zero = holds(off(value, place, dims), off(x, place, dims))
    return apply(
        function,
        (x, mask, value),
        {},
        Pads(zero, any_of(zero, holds(finite(value, place, dims), finite(x, place, dims)))),
    )


def zeros_like(function: Any, x: Any, **kwargs: Any) -> Any:
    """Return zeros everywhere."""
    return apply(function, (x,), kwargs, ZERO)


def with_masked(x: Tensor, key: Tensor, value: float) -> Tensor:
    """Return a copy of `x` after `x[key] = value`."""
    changed = x.clone()
    changed[key] = value
    return changed


def masked_set(function: Any, x: Any, key: Any, value: Any) -> Any:
    """Return a copy of `x` after `x[key] = value`, for a mask of positions and a number."""
    if not isinstance(x, Tokens) or x.swapped or not isinstance(key, Tensor) or key.dtype is not torch.bool:
        raise NotPacked
    if tuple(key.shape) != x.place.grid or not isinstance(value, int | float):
        raise NotPacked
    wide = key.reshape(*key.shape, *[1] * len(x.features))
    return masked_fill(torch.masked_fill, x, wide, value)
