"""The torch functions that give eager's results on packed values: one table.

An entry takes the arguments of a call in which `Tokens` stand for padded tensors. It gives one of three results:
`Tokens` (the result at tokens, its pads left open), a plain tensor (no pad has a part in it), or `NotImplemented` if
the padded value is needed. Three kinds of functions are in the table: functions that work position by position;
functions that look at some positions only, if these are tokens (indexing, a loss whose labels are ignored at pads); and
sums over values that are zero at pads.

Gradients follow values: if no pad has a part in a result, no pad gets a gradient from it.

A pad that is multiplied by zero still has a part in the product if it is infinite or NaN. The outputs of a model are
assumed to be finite at pads (the first step, in eager, shows whether they are). The values that a script computes from
them are followed: they may be infinite after a logarithm, a division by unknown numbers, or a fill with infinity.
Overflow is ignored, except in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepytorch.compiler.step.outputs.rules import by_feature, by_position, layers, parts, sums, views
from deepytorch.compiler.step.outputs.rules.operands import NotPacked, finite
from deepytorch.compiler.step.outputs.tokens import Pads, Tokens, all_of
from deepytorch.errors import DeferredError

Rule = Callable[..., Any]


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `function` on packed values; return its result, or `NotImplemented` if it needs padded values."""
    rule = TABLE.get(function)
    if rule is None or kwargs.get("out") is not None or kwargs.get("inplace"):
        return NotImplemented
    try:
        return rule(function, *args, **kwargs)
    except NotPacked:
        return NotImplemented
    except (torch.OutOfMemoryError, DeferredError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError):  # a wrong call: eager raises the right error
        return NotImplemented


def row_by_row(rows: Sequence[int], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that works row by row on tokens; return its result, or `NotImplemented`.

    rows: places of the arguments that are, like the results, (rows, ...).
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
    pads = Pads(finite=all_of(*(finite(args[index], place, 1) for index in rows)))
    if isinstance(made, Tensor):
        return Tokens.of(place, made, pads)
    return [Tokens.of(place, each, pads) if isinstance(each, Tensor) else each for each in made]


def _named(*names: str) -> list[Any]:
    """Return the functions of these names of torch, its tensors, `torch.nn.functional` and `torch.special`."""
    found = []
    for name in names:
        for home in (torch, torch.Tensor, F, torch.special):
            function = getattr(home, name, None)
            if callable(function):
                found.append(function)
    return found


_KEEP_ZEROS = (
    "neg", "negative", "abs", "absolute", "relu", "tanh", "square", "sign", "sin", "gelu", "silu", "leaky_relu", "elu",
    "softsign", "erf", "arctan", "floor", "ceil", "round", "trunc", "__neg__", "__abs__",
)  # fmt: skip


_POINTWISE = (
    "sigmoid", "logsigmoid", "softplus", "cos", "clamp", "clip", "clamp_min", "clamp_max", "logical_not", "__invert__",
    "bitwise_not", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "maximum", "minimum", "logical_xor", "logaddexp", "ones_like", "hardtanh", "mish",
    "selu", "celu", "relu6", "hardswish", "lerp", "addcmul", "__rsub__",
)  # fmt: skip


_SINGULAR = (
    "log", "log2", "log10", "reciprocal", "rsqrt", "logit", "xlogy", "addcdiv", "__rtruediv__",
)  # fmt: skip


CASTS = frozenset(
    _named("to", "float", "double", "half", "bfloat16", "type", "type_as", "int", "long", "bool", "cpu", "cuda")
)


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(_named(*_POINTWISE), by_position.pointwise),
    **dict.fromkeys(_named(*_SINGULAR), by_position.singular),
    **dict.fromkeys(_named("exp", "exp2"), by_position.exponential),
    **dict.fromkeys(_named("pow", "__pow__"), by_position.power),
    **dict.fromkeys(_named("__rpow__"), by_position.reflected_power),
    **dict.fromkeys(_named(*_KEEP_ZEROS), by_position.keeps_zeros),
    **dict.fromkeys(_named("log1p"), by_position.keeps_zeros_only),
    **dict.fromkeys(_named("expm1"), by_position.keeps_zeros_else_exponential),
    **dict.fromkeys(_named("nan_to_num"), by_position.made_finite),
    **dict.fromkeys(
        _named(
            "mul", "multiply", "__mul__", "__rmul__", "logical_and", "bitwise_and", "__and__", "__rand__"
        ),
        by_position.product,
    ),
    **dict.fromkeys(
        _named("div", "divide", "true_divide", "__truediv__", "remainder", "fmod", "floor_divide"),
        by_position.quotient,
    ),
    **dict.fromkeys(
        _named("add", "sub", "subtract", "__add__", "__radd__", "__sub__", "logical_or", "bitwise_or", "__or__"),
        by_position.sum_of_two,
    ),
    **dict.fromkeys(_named("masked_fill"), by_position.masked_fill),
    torch.zeros_like: by_position.zeros_like,
    torch.where: by_position.where,
    torch.Tensor.where: lambda function, x, condition, y: by_position.where(torch.where, condition, x, y),
    **dict.fromkeys(CASTS, views.cast),
    **dict.fromkeys(_named("contiguous", "clone", "detach"), views.same_numbers),
    **dict.fromkeys(_named("view", "reshape"), views.view),
    **dict.fromkeys(_named("flatten"), views.flatten),
    **dict.fromkeys(_named("unsqueeze"), views.unsqueeze),
    **dict.fromkeys(_named("squeeze"), views.squeeze),
    **dict.fromkeys(_named("transpose", "swapaxes"), views.transpose),
    **dict.fromkeys(_named("permute"), views.permute),
    getattr(torch.Tensor.mT, "__get__"): lambda function, x: views.transpose(function, x, -2, -1),  # noqa: B009
    torch.Tensor.__getitem__: parts.getitem,
    **dict.fromkeys(_named("narrow"), parts.narrow),
    **dict.fromkeys(_named("index_select"), parts.index_select),
    **dict.fromkeys(_named("split"), parts.split),
    **dict.fromkeys(_named("chunk"), parts.chunk),
    **dict.fromkeys(_named("unbind"), parts.unbind),
    **dict.fromkeys(_named("masked_select"), parts.masked_select),
    **dict.fromkeys(_named("cat", "concat", "concatenate"), parts.cat),
    **dict.fromkeys(_named("stack"), parts.stack),
    **dict.fromkeys(_named("softmax", "log_softmax"), by_feature.softmax),
    **dict.fromkeys(
        _named("logsumexp", "argmax", "argmin", "amax", "amin", "cumsum", "cumprod", "var", "std", "prod", "glu"),
        partial(by_feature.over_features, "dim"),
    ),
    **dict.fromkeys(_named("argsort", "sort"), partial(by_feature.over_features, "dim", default=-1)),
    **dict.fromkeys(_named("topk"), partial(by_feature.over_features, "dim", place=2, default=-1)),
    **dict.fromkeys(_named("max", "min"), by_feature.extreme),
    **dict.fromkeys(_named("gather"), by_feature.gather),
    **dict.fromkeys(_named("take_along_dim"), by_feature.take_along),
    **dict.fromkeys(_named("sum", "mean"), sums.sum_or_mean),
    **dict.fromkeys(_named("any"), sums.any_true),
    **dict.fromkeys(_named("count_nonzero"), sums.count_nonzero),
    **dict.fromkeys(_named("norm"), by_feature.norm),
    torch.linalg.vector_norm: by_feature.vector_norm,
    F.linear: layers.linear,
    **dict.fromkeys(_named("matmul", "__matmul__"), layers.matmul),
    F.layer_norm: layers.norm_layer,
    F.rms_norm: layers.norm_layer,
    F.dropout: layers.dropout,
    F.normalize: by_feature.normalize,
    F.cosine_similarity: by_feature.similarity,
    F.cross_entropy: layers.cross_entropy,
    F.nll_loss: lambda function, *args, **kwargs: layers.cross_entropy(function, *args, **kwargs),
    **dict.fromkeys(
        (
            F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
        ),
        layers.elementwise_loss,
    ),
    by_position.with_masked: by_position.masked_set,
}  # fmt: skip


# Functions that change their first argument, each with the function that returns the changed value as a new one.
OUT_OF_PLACE: dict[Any, Any] = {
    torch.Tensor.__setitem__: by_position.with_masked,
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
        "permute", "narrow", "split", "chunk", "unbind",
    )
) | {torch.Tensor.__getitem__, getattr(torch.Tensor.mT, "__get__"), F.dropout}  # noqa: B009  # fmt: skip
