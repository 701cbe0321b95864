"""The operands of one call, brought together: packed rows, and plain tensors that span the padded grid or a part of it.

`NotPacked` is raised for operands that cannot be brought together: the padded value is needed then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.step.outputs.tokens import AsItWas, Condition, Pads, Place, Tokens, all_of, always, never


class NotPacked(Exception):
    """An error for a call that needs the padded value."""


def shared(operands: Sequence[Any]) -> tuple[Place, int]:
    """Return the place that all packed operands share, and the number of dimensions of their padded values."""
    packed = [each for each in operands if isinstance(each, Tokens)]
    place, dims = packed[0].place, len(packed[0].shape)
    for each in packed:
        if each.swapped or len(each.shape) != dims or not each.place.is_like(place):
            raise NotPacked
    return place, dims


def aligned(operand: Any, place: Place, dims: int) -> Any:
    """Return an operand in a form that broadcasts with packed rows: (entries or 1, *features), or features only."""
    if isinstance(operand, Tokens):
        return operand.rows()
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    if operand.dim() > dims or operand.is_sparse:
        raise NotPacked
    missing = dims - operand.dim()
    if missing >= len(place.grid):
        return operand
    whole = operand[(None,) * missing] if missing else operand
    if not place.spread(whole):
        raise NotPacked
    return place.take(whole)


def apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pads: Pads) -> Any:
    """Apply a function that works position by position. pads: the conditions on its result's pads."""
    operands = [*args, *kwargs.values()]
    place, dims = shared(operands)
    rows = function(
        *(aligned(each, place, dims) for each in args),
        **{name: aligned(each, place, dims) for name, each in kwargs.items()},
    )
    if not isinstance(rows, Tensor) or rows.dim() != dims - len(place.grid) + 1 or rows.shape[0] != place.count:
        raise NotPacked
    return Tokens.of(place, rows, pads)


def off(operand: Any, place: Place, dims: int, *, inverted: bool = False) -> Condition:
    """Return the condition that an operand is zero at pads, or, inverted, that it is nonzero there.

    A plain tensor is looked at only when the condition is asked.
    """
    if isinstance(operand, Tokens):
        return never if inverted else operand.pads.zero
    if not isinstance(operand, Tensor):
        return always if isinstance(operand, bool | int | float) and bool(operand) == inverted else never
    whole = operand.expand(*place.grid, *[1] * (dims - len(place.grid))) if operand.dim() == 0 else operand
    flags = _flags(whole, place, dims, inverted)
    return never if flags is None else AsItWas(operand, lambda: place.is_off_at_pads(flags()))


def finite(operand: Any, place: Place, dims: int) -> Condition:
    """Return the condition that an operand is neither infinite nor NaN at pads."""
    if isinstance(operand, Tokens):
        return operand.pads.finite
    if isinstance(operand, float):
        return always if math.isfinite(operand) else never
    if not isinstance(operand, Tensor) or not (operand.dtype.is_floating_point or operand.dtype.is_complex):
        return always
    return _nowhere(lambda plain: plain.isfinite().logical_not(), operand, place, dims)


def all_finite(operands: Sequence[Any], place: Place, dims: int) -> Condition:
    """Return the condition that no operand is infinite or NaN at pads."""
    return all_of(*(finite(each, place, dims) for each in operands))


def pads_of(value: Tensor, place: Place) -> Pads:
    """Return the conditions on the pads of a padded value that is computed; it is looked at when they are asked."""
    return Pads(off(value, place, value.dim()), finite(value, place, value.dim()))


def divides(operand: Any, place: Place, dims: int) -> Condition:
    """Return the condition that, at pads, division by an operand keeps finite values finite and zeros zero."""
    if isinstance(operand, Tokens):
        return never
    if not isinstance(operand, Tensor):
        return always if isinstance(operand, int | float) and operand != 0 and math.isfinite(operand) else never
    return _nowhere(lambda plain: (plain == 0) | plain.isfinite().logical_not(), operand, place, dims)


def _nowhere(bad: Callable[[Tensor], Tensor], operand: Tensor, place: Place, dims: int) -> Condition:
    """Return the condition that a plain operand is `bad` at no pad; nowhere if it has no token dimensions."""
    tokens, missing = len(place.grid), dims - operand.dim()

    def look() -> bool:
        found = bad(operand.detach())
        if missing >= tokens:
            return not bool(found.any())
        whole = found[(None,) * missing].flatten(tokens).any(-1) if dims > tokens else found[(None,) * missing]
        return place.is_off_at_pads(whole)

    return AsItWas(operand, look)


def _flags(operand: Tensor, place: Place, dims: int, inverted: bool) -> Callable[[], Tensor] | None:
    """Return a function that flags the positions at which a plain operand is nonzero, or, inverted, zero.

    Flags are (*grid), or 1 along dimensions of the grid. None if the operand does not span the grid.
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
