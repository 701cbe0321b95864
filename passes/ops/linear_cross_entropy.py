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
from deepytorch.passes.ops.library import LIBRARY, define_once, qualified
from deepytorch.passes.ops.linear_cross_entropy_chunked import LossRule
from deepytorch.passes.ops.reference import linear_cross_entropy_reference
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
    _check(hidden, weight, bias, target, class_weight, rule, reduction)
    return torch.ops.deepytorch.linear_cross_entropy.default(
        hidden, weight, bias, target, class_weight, **rule._asdict()
    )


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    rule: LossRule,
    reduction: str,
) -> None:
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


def _whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, **rule: Any
) -> Tensor:
    """Call the operator above autograd, where it is visible which gradients will be asked for."""
    wants = [each is not None and each.requires_grad and torch.is_grad_enabled() for each in (hidden, weight, bias)]
    return torch.ops.deepytorch.linear_cross_entropy_sweep.default(
        hidden, weight, bias, target, class_weight, **rule, gradients=wants
    )[0]


@disable_dynamo
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *,
    gradients: list[bool],
    **rule: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = _triton_form(hidden) or chunked
    with torch.autocast(hidden.device.type, enabled=False):
        loss, made, logsumexp = form.forward(hidden, weight, bias, target, class_weight, LossRule(**rule), gradients)
    return loss, *made, logsumexp


def _triton_form(hidden: Tensor) -> ModuleType | None:
    """Return the module with kernels for these hidden states, or None if there are none."""
    if hidden.device.type != "cuda" or hidden.dtype not in _TRITON_DTYPES or not _has_triton():
        return None
    from deepytorch.passes.ops import linear_cross_entropy_triton

    return linear_cross_entropy_triton


@functools.cache
def _has_triton() -> bool:
    # other vendors' libraries do not multiply half precision into float32
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def _forward_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *,
    gradients: list[bool],
    reduction: int = chunked.MEAN,
    upcast: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    later = reduction == chunked.NONE
    loss = hidden.new_empty(hidden.shape[:1] if later else (), dtype=chunked.loss_dtype(hidden.dtype, upcast))
    dtype = chunked.gradient_dtype(hidden.dtype)
    made = [
        each.new_empty(each.shape if wanted and not later else 0, dtype=dtype)
        for each, wanted in zip((hidden, weight, hidden if bias is None else bias), gradients, strict=True)
    ]
    logsumexp = hidden.new_empty(hidden.shape[:1] if later else 0, dtype=chunked.computed_in(hidden.dtype))
    return loss, made[0], made[1], made[2], logsumexp


@disable_dynamo
def _gradients(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    logsumexp: Tensor,
    *made: Tensor,
    gradients: list[bool],
    **rule: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if rule.get("reduction", chunked.MEAN) != chunked.NONE:
        # a 0-d number takes part in the product without being rounded first
        one, two, three = ((each * grad_loss).to(hidden.dtype) for each in made)
        return one, two, three
    given, wanted = (hidden, weight, bias, target, class_weight), LossRule(**rule)
    form = _triton_form(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if form is not None:
            found = form.backward(grad_loss, *given, logsumexp, wanted, gradients)
        else:
            found = chunked.backward(grad_loss, *given, wanted, gradients)
    one, two, three = (each.to(hidden.dtype) for each in found)
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
    hidden, weight, bias, target, class_weight, *made, logsumexp = ctx.saved_tensors
    needed, gradients = ctx.needs_input_grad, ctx.options["gradients"]
    assert all(ours or not asked for asked, ours in zip(needed[:3], gradients, strict=True)), "a gradient was not made"
    found = torch.ops.deepytorch.linear_cross_entropy_backward.default(
        grad_loss, hidden, weight, bias, target, class_weight, logsumexp, *made, **ctx.options
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
    wants = [True, *options.pop("gradients")]
    creates_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        given: list[Any] = [None if each is None else each.view_as(each) for each in (grad_loss, hidden, weight, bias)]
        if not creates_graph:
            given = [None if each is None else each.detach().requires_grad_() for each in given]
        grad, h, w, b = given
        loss = linear_cross_entropy_reference(h, w, b, target, class_weight, LossRule(**options))
        first = {place: each for place, each in enumerate(given) if place and wants[place] and each is not None}
        found = torch.autograd.grad(loss, list(first.values()), grad, create_graph=True)
        upstream = [gradients[place - 1] for place in first]
        wanted = {place: each for place, each in enumerate(given) if each is not None and each.requires_grad}
        second = torch.autograd.grad(
            found,
            list(wanted.values()),
            [torch.zeros_like(one) if two is None else two for one, two in zip(found, upstream, strict=True)],
            create_graph=creates_graph,
            allow_unused=True,
        )
    of = dict(zip(wanted, second, strict=True))
    return of.get(0), of.get(1), of.get(2), of.get(3), None, None, None, None, None, None


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    if not define_once(_WHOLE, tags):
        return
    define_once(_SWEEP, tags)
    define_once(_BACKWARD, tags)
    name, backward = qualified("linear_cross_entropy_sweep"), qualified("linear_cross_entropy_backward")
    LIBRARY.impl("linear_cross_entropy", _whole, "CompositeImplicitAutograd")
    LIBRARY.impl("linear_cross_entropy_sweep", _forward, "CompositeExplicitAutograd")
    LIBRARY.impl("linear_cross_entropy_backward", _gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(name, _forward_fake, lib=LIBRARY)
    torch.library.register_fake(backward, _gradients_fake, lib=LIBRARY)
    torch.library.register_autograd(name, _backward, setup_context=_setup_context, lib=LIBRARY)
    torch.library.register_autograd(backward, _backward_of_backward, setup_context=_setup_backward_context, lib=LIBRARY)


_register()
