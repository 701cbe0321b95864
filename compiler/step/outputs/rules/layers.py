"""Layers that work token by token, and losses whose labels are ignored at pads. Arguments have torch's names."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepytorch.compiler.step.outputs.rules.operands import NotPacked, all_finite, apply, shared
from deepytorch.compiler.step.outputs.tokens import AsItWas, Pads, Tokens, any_of


def linear(function: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """Apply `linear` to each token's row of features."""
    if not isinstance(input, Tokens) or input.swapped or not input.features:
        raise NotPacked
    if isinstance(weight, Tokens) or isinstance(bias, Tokens):
        raise NotPacked
    return Tokens.of(input.place, function(input.rows(), weight, bias), Pads(finite=input.pads.finite))


def matmul(function: Any, x: Any, y: Any) -> Any:
    """Multiply each token's row by a plain matrix on the right."""
    if not isinstance(x, Tokens) or x.swapped or len(x.features) != 1 or not isinstance(y, Tensor) or y.dim() != 2:
        raise NotPacked
    return Tokens.of(x.place, function(x.rows(), y), Pads(finite=x.pads.finite))


def norm_layer(function: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `layer_norm` or `rms_norm` over features."""
    if not isinstance(input, Tokens) or input.swapped or len(normalized_shape) > len(input.features):
        raise NotPacked
    if any(isinstance(each, Tokens) for each in (*args, *kwargs.values())):
        raise NotPacked
    rows = function(input.rows(), normalized_shape, *args, **kwargs)
    return Tokens.of(input.place, rows, Pads(finite=input.pads.finite))


def dropout(function: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return the input if nothing is to be drawn; else the padded value is needed, so that draws are eager's."""
    if not isinstance(input, Tokens) or inplace or (training and p > 0):
        raise NotPacked
    return input.later(lambda rows: rows)


def cross_entropy(
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
    """Apply `cross_entropy` or `nll_loss` with one label a position, which is ignored at every pad."""
    more = {} if function is F.nll_loss else {"label_smoothing": label_smoothing}
    if not isinstance(input, Tokens) or not isinstance(target, Tensor) or target.is_floating_point():
        raise NotPacked
    place = input.place
    if len(input.features) != 1 or input.swapped != (len(place.grid) == 2) or tuple(target.shape) != place.grid:
        raise NotPacked
    if isinstance(weight, Tokens) or size_average is not None or reduce is not None:
        raise NotPacked
    counts = target != ignore_index
    labels = place.take(target)
    if reduction == "none":
        rows = function(input.rows(), labels, weight, ignore_index=ignore_index, reduction=reduction, **more)
        zero = AsItWas(counts, lambda: place.is_off_at_pads(counts))
        return Tokens.of(place, rows, Pads(zero, any_of(input.pads.finite, zero)))
    if not place.is_off_at_pads(counts):
        raise NotPacked
    return function(input.rows(), labels, weight, ignore_index=ignore_index, reduction=reduction, **more)


def elementwise_loss(function: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a loss that treats each entry by itself and is not reduced."""
    if args:
        bound = inspect.signature(function).bind(input, target, *args, **kwargs)
        kwargs = {name: each for name, each in bound.arguments.items() if name not in ("input", "target")}
    if kwargs.get("reduction", "mean") != "none" or kwargs.get("reduce") is not None:
        raise NotPacked
    if kwargs.get("size_average") is not None:
        raise NotPacked
    place, dims = shared((input, target))
    shapes = [tuple(each.shape) for each in (input, target)]
    if shapes[0] != shapes[1]:
        raise NotPacked
    pads = Pads(finite=all_finite((input, target, *kwargs.values()), place, dims))
    return apply(function, (input, target), kwargs, pads)
