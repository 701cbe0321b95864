"""Functions along features, which treat each token by itself: `softmax`, `argmax`, `topk`, `gather`, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepytorch.compiler.step.outputs.rules.by_position import pointwise
from deepytorch.compiler.step.outputs.rules.operands import NotPacked, aligned, all_finite, shared
from deepytorch.compiler.step.outputs.tokens import Pads, Tokens


def over_features(name: str, function: Any, *args: Any, place: int = 1, default: Any = None, **kwargs: Any) -> Any:
    """Apply a function along dimensions of features. name: of the argument that holds them, the `place`-th."""
    x = args[0] if args else kwargs.pop("input", None)
    given = list(args[1:])
    if not isinstance(x, Tokens) or x.swapped:
        raise NotPacked
    if len(given) >= place:
        dim = given[place - 1]
    else:
        dim = kwargs.get(name, default)
    if dim is None:
        raise NotPacked
    dims = [dim] if isinstance(dim, int) else list(dim)
    tokens, count = x.num_token_dims, len(x.shape)
    if not dims or not all(isinstance(each, int) and not isinstance(each, bool) for each in dims):
        raise NotPacked
    if any(not -count <= each < count or each % count < tokens for each in dims):
        raise NotPacked
    moved = [each % count - tokens + 1 for each in dims]
    inside: Any = moved[0] if isinstance(dim, int) else moved
    others = [each for each in (*given, *kwargs.values()) if isinstance(each, Tensor | Tokens)]
    if others:
        raise NotPacked
    if len(given) >= place:
        given[place - 1] = inside
    else:
        kwargs[name] = inside
    made = function(x.rows(), *given, **kwargs)
    pads = Pads(finite=x.pads.finite)
    if isinstance(made, Tensor):
        return Tokens.of(x.place, made, pads)
    results = [Tokens.of(x.place, each, pads) for each in made]
    return results if isinstance(made, list) else Several(type(made), results)


class Several:
    """The result of a function that gives several tensors under names, such as `max`."""

    def __init__(self, kind: type, items: Sequence[Any]) -> None:
        self.kind, self.items = kind, items


def extreme(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `max` or `min` over features, or to two values."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor | Tokens):
        return pointwise(function, x, *args, **kwargs)
    return over_features("dim", function, x, *args, **kwargs)


def softmax(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `softmax` or `log_softmax` along features."""
    return over_features("dim", function, x, *args, **kwargs)


def gather(function: Any, x: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Gather along features, with indices of each token's own."""
    place, dims = shared((x, index))
    if not isinstance(x, Tokens) or not isinstance(dim, int) or dim % dims < x.num_token_dims or kwargs:
        raise NotPacked
    if isinstance(index, Tensor) and (index.dim() != dims or tuple(index.shape[: x.num_token_dims]) != place.grid):
        raise NotPacked
    inside = aligned(index, place, dims)
    if any(own < asked for own, asked in zip(x.features, inside.shape[1:], strict=True)) and len(x.features) > 1:
        raise NotPacked
    picked = function(x.rows(), dim % dims - x.num_token_dims + 1, inside)
    return Tokens.of(place, picked, Pads(finite=x.pads.finite))


def take_along(function: Any, x: Any, index: Any, dim: Any = None) -> Any:
    """Apply `take_along_dim`: `gather` with its arguments in another order."""
    return gather(torch.gather, x, dim, index)


def normalize(function: Any, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Apply `normalize`, whose third argument is `dim`."""
    return over_features("dim", function, input, p, dim, eps, place=2)


def norm(function: Any, input: Any, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Apply `norm`, whose third argument is `dim`."""
    return over_features("dim", function, input, p, dim, *args, place=2, **kwargs)


def vector_norm(function: Any, x: Any, ord: Any = 2, dim: Any = None, **kwargs: Any) -> Any:
    """Apply `vector_norm`, whose third argument is `dim`."""
    return over_features("dim", function, x, ord, dim, place=2, **kwargs)


def similarity(function: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Apply `cosine_similarity` to two values, along features."""
    place, dims = shared((x1, x2))
    if dim % dims < len(place.grid):
        raise NotPacked
    inside = dim % dims - len(place.grid) + 1
    pads = Pads(finite=all_finite((x1, x2), place, dims))
    return Tokens.of(place, function(aligned(x1, place, dims), aligned(x2, place, dims), inside, eps), pads)
