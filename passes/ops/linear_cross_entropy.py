"""`deepytorch::linear_cross_entropy`: a linear layer and the cross-entropy of its output, a piece of rows at a time.

Logits are never whole in memory: for 4,096 tokens and a vocabulary of 128,000 the logits, their softmax and its
gradient would take 2 GB each in fp32. Gradients of the hidden states, the weight and the bias are computed in the same
sweep, while a piece's logits exist, as in Liger Kernel's fused loss (arXiv:2410.10989); the backward scales them. A
loss for each row has a gradient for each row, which only the backward knows, so there the logits are computed again.

Work for N counted rows, hidden size H and V classes: 6 N H V flops (2 N H V without gradients, 8 N H V for a loss of
each row). Reads and writes: the weight and its gradient once per piece. Ignored rows cost nothing on a CPU; for CUDA
see `linear_cross_entropy_triton`.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepytorch.passes.ops import linear_cross_entropy_chunked as chunked
from deepytorch.passes.ops.library import register
from deepytorch.passes.ops.linear_cross_entropy_chunked import Call, LossRule
from deepytorch.passes.ops.reference import linear_cross_entropy_reference, second_derivatives
from deepytorch.torch_internals import disable_dynamo

_REDUCTIONS = {"none": chunked.NONE, "mean": chunked.MEAN, "sum": chunked.SUM}
_GIVEN = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Fields of LossRule.
_RULE = (
    "int reduction=1, int ignore_index=-100, float label_smoothing=0.0, float softcap=0.0, bool upcast=False, "
    "float z_loss=0.0"
)
_WHOLE = f"linear_cross_entropy({_GIVEN}, *, {_RULE}) -> Tensor"
_SWEEP = (
    f"linear_cross_entropy_sweep({_GIVEN}, *, {_RULE}, bool[] gradients) "
    "-> (Tensor loss, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor logsumexp)"
)
_BACKWARD = (
    f"linear_cross_entropy_backward(Tensor grad_loss, {_GIVEN}, Tensor logsumexp, Tensor grad_hidden, "
    f"Tensor grad_weight, Tensor grad_bias, *, {_RULE}, bool[] gradients) -> (Tensor, Tensor, Tensor)"
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    upcast: bool = False,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute `cross_entropy(linear(hidden, weight, bias), target)` without holding all logits.

    Args:
        hidden: (tokens, hidden), floating.
        weight: (classes, hidden), in the dtype of `hidden`.
        target: (tokens,) int64, from 0 to classes - 1, or `ignore_index`.
        bias: (classes,).
        class_weight: (classes,), as `weight` of `torch.nn.functional.cross_entropy`.
        reduction: "mean" over the rows that are not ignored (NaN where all are), "sum", or "none", which gives each
            row's loss, 0 where it is ignored, and takes a third more work for gradients.
        ignore_index: the target of rows without a loss.
        label_smoothing: in [0, 1).
        softcap: if positive, logits become softcap * tanh(logits / softcap).
        upcast: whether the loss is float32 whatever the dtype of the logits, as if they were cast before the loss. The
            loss is computed in float32 (float64 for float64) in any case.
        z_loss: a factor: z_loss * logsumexp(logits) ** 2 is added to the loss of each row that is not ignored, reduced
            as the loss is. Class weights do not apply to it: its mean is over the number of rows.

    Returns:
        The loss: (), or (tokens,) under "none", in the dtype of `hidden`, or float32 with `upcast`.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit together.
    """
    rule = LossRule(_REDUCTIONS.get(reduction, -1), ignore_index, label_smoothing, softcap, upcast, z_loss)
    call = Call(hidden, weight, bias, target, class_weight, rule)
    _check(call, reduction)
    return torch.ops.deepytorch.linear_cross_entropy.default(*call[:-1], **rule._asdict())


def _check(call: Call, reduction: str) -> None:
    hidden, weight, bias, target, class_weight, rule = call
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise _wrong(f"hidden of shape {tuple(hidden.shape)} and dtype {hidden.dtype}", "(tokens, hidden), floating")
    if weight.dim() != 2 or weight.size(1) != hidden.size(1) or weight.dtype != hidden.dtype:
        raise _wrong(
            f"weight of shape {tuple(weight.shape)} and dtype {weight.dtype}",
            f"(classes, {hidden.size(1)}) of {hidden.dtype}",
        )
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise _wrong(f"target of shape {tuple(target.shape)} and dtype {target.dtype}", f"({hidden.size(0)},) of int64")
    for name, each in (("bias", bias), ("class_weight", class_weight)):
        if each is not None and each.shape != weight.shape[:1]:
            raise _wrong(f"{name} of shape {tuple(each.shape)}", f"({weight.size(0)},)")
    if rule.reduction < 0:
        raise _wrong(f"reduction {reduction!r}", "'mean', 'sum' or 'none'")
    if not 0.0 <= rule.label_smoothing < 1.0 or (rule.label_smoothing and class_weight is not None):
        raise _wrong(
            f"label_smoothing {rule.label_smoothing}{' and class_weight' if class_weight is not None else ''}",
            "a number in [0, 1), and one of the two",
        )
    if not rule.softcap >= 0.0:
        raise _wrong(f"softcap {rule.softcap}", "a positive number, or 0 for none")
    if not 0.0 <= rule.z_loss < float("inf"):
        raise _wrong(f"z_loss {rule.z_loss}", "a positive number, or 0 for none")


def _wrong(found: str, expected: str) -> ValueError:
    return ValueError(f"linear_cross_entropy: found {found}; expected {expected}")


def _whole(*tensors: Tensor | None, **rule: Any) -> Tensor:
    """Call the operator above autograd, where it is visible which gradients will be asked for."""
    wants = [each is not None and each.requires_grad and torch.is_grad_enabled() for each in tensors[:3]]
    return torch.ops.deepytorch.linear_cross_entropy_sweep.default(*tensors, **rule, gradients=wants)[0]


def _call(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, **rule: Any
) -> Call:
    return Call(hidden, weight, bias, target, class_weight, LossRule(**rule))


@disable_dynamo
def _forward(*tensors: Any, gradients: list[bool], **rule: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _call(*tensors, **rule)
    with torch.autocast(call.hidden.device.type, enabled=False):
        loss, made, logsumexp = _form(call.hidden).forward(call, gradients)
    return loss, *made, logsumexp


def _form(hidden: Tensor) -> ModuleType:
    """Return the module that computes these hidden states: that with kernels where it can."""
    if hidden.device.type != "cuda" or hidden.dtype not in _TRITON_DTYPES or not _has_triton():
        return chunked
    from deepytorch.passes.ops import linear_cross_entropy_triton

    return linear_cross_entropy_triton


@functools.cache
def _has_triton() -> bool:
    # other vendors' libraries do not multiply half precision into float32
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def _forward_fake(*tensors: Any, gradients: list[bool], **rule: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _call(*tensors, **rule)
    hidden, weight, bias, *_ = call
    by_row, dtype = call.is_by_row, hidden.dtype
    loss = hidden.new_empty(hidden.shape[:1] if by_row else (), dtype=chunked.loss_dtype(dtype, call.rule.upcast))
    one, two, three = (
        each.new_empty(each.shape if wanted and not by_row else 0, dtype=chunked.gradient_dtype(dtype))
        for each, wanted in zip((hidden, weight, hidden if bias is None else bias), gradients, strict=True)
    )
    logsumexp = hidden.new_empty(hidden.shape[:1] if by_row else 0, dtype=chunked.computed_in(dtype))
    return loss, one, two, three, logsumexp


@disable_dynamo
def _gradients(grad_loss: Tensor, *saved: Any, gradients: list[bool], **rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, logsumexp, made = _call(*saved[:5], **rule), saved[5], saved[6:]
    hidden = call.hidden
    if call.is_by_row:
        with torch.autocast(hidden.device.type, enabled=False):
            made = _form(hidden).backward(call, grad_loss, logsumexp, gradients)
    else:  # a 0-d number takes part in the product without being rounded first
        made = tuple(each * grad_loss for each in made)
    one, two, three = (each.to(hidden.dtype) for each in made)
    return one, two, three


def _gradients_fake(
    grad_loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, gradients: list[bool], **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = (
        hidden.new_empty(each.shape if wanted and each is not None else 0)
        for each, wanted in zip((hidden, weight, bias), gradients, strict=True)
    )
    return one, two, three


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, *made = output
    ctx.save_for_backward(*inputs, *made)
    ctx.mark_non_differentiable(*made)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, grad_hidden, grad_weight, grad_bias, logsumexp = ctx.saved_tensors
    needed, gradients = ctx.needs_input_grad, ctx.options["gradients"]
    assert all(ours or not asked for asked, ours in zip(needed[:3], gradients, strict=True)), "a gradient was not made"
    found = torch.ops.deepytorch.linear_cross_entropy_backward.default(
        grad_loss, *tensors, logsumexp, grad_hidden, grad_weight, grad_bias, **ctx.options
    )
    return *(each if asked else None for each, asked in zip(found, needed, strict=False)), None, None


def _setup_backward_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = dict(keyword_only_inputs)


def _backward_of_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return second derivatives, of the operator's meaning in plain torch: slow, and with all logits in memory."""
    grad_loss, hidden, weight, bias, target, class_weight = ctx.saved_tensors
    options = dict(ctx.options)
    wants = options.pop("gradients")

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy_reference(hidden, weight, bias, target, class_weight, LossRule(**options))

    target_to_made = (None,) * 6
    return *second_derivatives(loss, grad_loss, (hidden, weight, bias), wants, gradients), *target_to_made


def _flops(hidden: torch.Size, weight: torch.Size, *_: Any, **options: Any) -> int:
    """Return the operations of the logits, and of each gradient that is computed with them."""
    return int(2 * hidden[0] * hidden[1] * weight[0] * (1 + sum(options["gradients"][:2])))


register(_WHOLE, {"CompositeImplicitAutograd": _whole})
register(_SWEEP, {"CompositeExplicitAutograd": _forward}, _forward_fake, _backward, _setup_context, flops=_flops)
register(
    _BACKWARD,
    {"CompositeExplicitAutograd": _gradients},
    _gradients_fake,
    _backward_of_backward,
    _setup_backward_context,
)
