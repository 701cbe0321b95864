"""The form of `linear_cross_entropy` for every device: pieces of rows, each computed by torch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NONE, MEAN, SUM = 0, 1, 2
NO_GRADIENTS = (False, False, False)
# Bytes of a piece's logits in the dtype of the loss; on GPUs their softmax takes as much again. Each piece reads the
# weight twice and adds to its gradient: on two CPU cores 4,096 rows x 256 x 128,256 took 6.6, 5.9, 5.35, 5.5 s with 60,
# 120, 256, 400 MiB.
_CHUNK_BYTES, _CHUNK_BYTES_CPU = 120 << 20, 256 << 20
_LEAST_ROWS = 64
_ENOUGH_ROWS_CPU, _ENOUGH_BYTES_CPU = 512, 4 << 20  # larger pieces do not stay in the caches
_NEXT_TO_NOTHING = 1e-20  # below this, the logarithm of a probability loses accuracy


class LossRule(NamedTuple):
    """The computation of the loss from logits. reduction: `NONE`, `MEAN` or `SUM`, numbered as in ATen."""

    reduction: int = MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    upcast: bool = False
    z_loss: float = 0.0


class Call(NamedTuple):
    """The arguments of one call of `linear_cross_entropy`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    rule: LossRule

    @property
    def is_by_row(self) -> bool:
        """Return whether each row has a loss, and a loss gradient, of its own, which the forward does not know."""
        return self.rule.reduction == NONE


class Gradients(NamedTuple):
    """The gradients of hidden, weight and bias, in `gradient_dtype`; a gradient that is not asked for is empty."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class RowWeights(NamedTuple):
    """The weights of rows in the loss, each (tokens,) except `nothing`.

    Attributes:
        target: 0 at ignored rows.
        counted: whether the row is not ignored.
        share: the factor of the row's cross-entropy; 0 at ignored rows.
        z_share: the factor of `z_loss` times the row's squared logsumexp.
        nothing: (), the start of the sum over rows: NaN for the mean of no rows, else 0.
    """

    target: Tensor
    counted: Tensor
    share: Tensor
    z_share: Tensor
    nothing: Tensor


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are held until the loss's own gradient is known.

    Gradients are computed as if the loss's gradient were 1. float16 would lose the small ones before they are scaled.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def loss_dtype(dtype: torch.dtype, upcast: bool) -> torch.dtype:
    """Return the dtype of the loss of hidden states of `dtype`."""
    return computed_in(dtype) if upcast else dtype


def row_weights(call: Call, grad_loss: Tensor | None = None) -> RowWeights:
    """Return `RowWeights` in the dtype of sums, without waiting for the device.

    If `grad_loss` (tokens,) is given, it multiplies them.
    """
    target, class_weight, rule, dtype = call.target, call.class_weight, call.rule, computed_in(call.hidden.dtype)
    counted = target != rule.ignore_index
    safe = target.where(counted, 0)
    z_share = counted.to(dtype)
    share = z_share if class_weight is None else class_weight.to(dtype)[safe] * counted
    nothing = share.new_zeros(())
    if rule.reduction == MEAN:
        total, number = share.sum(), z_share.sum()
        nothing = 0.0 / total
        share, z_share = share / total.where(total != 0, 1.0), z_share / number.clamp(min=1.0)
    if grad_loss is not None:
        share, z_share = ((each * grad_loss.to(dtype)).where(counted, 0.0) for each in (share, z_share))
    return RowWeights(safe, counted, share, z_share, nothing)


def losses_of_rows(cross_entropy: Tensor, logsumexp: Tensor, weights: RowWeights, z_loss: float) -> Tensor:
    """Return each row's part of the loss, (tokens,)."""
    losses = (cross_entropy * weights.share).masked_fill(weights.share == 0, 0.0)
    if z_loss:
        losses = losses + (z_loss * logsumexp.square() * weights.z_share).masked_fill(weights.z_share == 0, 0.0)
    return losses


def loss_of(losses: Tensor, weights: RowWeights, call: Call) -> Tensor:
    """Return the loss, reduced or by row, from each row's part."""
    loss = losses if call.is_by_row else losses.sum() + weights.nothing
    return loss.to(loss_dtype(call.hidden.dtype, call.rule.upcast))


def forward(call: Call, gradients: Sequence[bool]) -> tuple[Tensor, Gradients, Tensor]:
    """Return the loss, the gradients for a loss gradient of 1, and (tokens,) logsumexp for `backward`.

    Gradients of a loss by row are empty, as they are not known yet. Logsumexp of any other loss is empty.
    """
    weights = row_weights(call)
    cross_entropy, logsumexp, made = _sweep(call, weights, NO_GRADIENTS if call.is_by_row else gradients)
    loss = loss_of(losses_of_rows(cross_entropy, logsumexp, weights, call.rule.z_loss), weights, call)
    made = Gradients(*(each.to(gradient_dtype(call.hidden.dtype)) for each in made))
    return loss, made, logsumexp if call.is_by_row else logsumexp.new_empty(0)


def backward(call: Call, grad_loss: Tensor, logsumexp: Tensor, gradients: Sequence[bool]) -> Gradients:
    """Return the gradients of a loss by row, for grad_loss (tokens,). Logits and logsumexp are computed again."""
    return _sweep(call, row_weights(call, grad_loss), gradients)[2]


def _sweep(call: Call, weights: RowWeights, gradients: Sequence[bool]) -> tuple[Tensor, Tensor, Gradients]:
    """Return the cross-entropy and logsumexp of each row (0 where ignored), and gradients for the rows' weights."""
    hidden, weight, bias, _, _, rule = call
    if hidden.dtype == torch.float16:
        # sums over many rows overflow float16, and on the devices that use this form float16 is no faster
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    dtype = computed_in(hidden.dtype)
    rows, number = None, hidden.size(0)
    target, counted, share, z_share, _ = weights
    if hidden.device.type == "cpu":  # on other devices, counting the rows would wait for the device
        rows = counted.nonzero().squeeze(1)
        if rows.numel() == number:
            rows = None
        else:
            hidden, target, counted, share, z_share = (each[rows] for each in (hidden, target, counted, share, z_share))
    cross_entropy, logsumexp = (share.new_zeros(hidden.size(0)) for _ in range(2))
    wants_hidden, wants_weight, wants_bias = gradients
    # always contiguous, whatever the inputs' strides: a graph's compiler relies on the strides of the fake form
    grad_hidden = hidden.new_empty(hidden.shape) if wants_hidden else hidden.new_empty(0)
    grad_weight = weight.new_empty(weight.shape, dtype=dtype) if wants_weight else weight.new_empty(0)
    if wants_weight and hidden.size(0) == 0:
        grad_weight.zero_()
    grad_bias = weight.new_zeros(weight.size(0), dtype=dtype) if wants_bias else weight.new_empty(0)
    step = _rows_of_a_piece(weight, dtype)
    make = _Logits(weight, bias, rule.softcap, dtype, min(step, hidden.size(0)))
    for start in range(0, hidden.size(0), step):
        piece = slice(start, min(start + step, hidden.size(0)))
        h, wanted, factor = hidden[piece], target[piece].unsqueeze(1), share[piece].unsqueeze(1)
        logits = make(h)
        at_target = logits.gather(1, wanted)
        losses = (rule.label_smoothing - 1.0) * at_target
        if rule.label_smoothing > 0:
            losses = losses - rule.label_smoothing * logits.mean(-1, keepdim=True)
        probabilities, found = make.softmax(logits, h, wanted, at_target)
        losses = losses + found
        logsumexp[piece], cross_entropy[piece] = found.squeeze(1), losses.squeeze(1)
        if not any(gradients):
            continue
        less = torch.ones_like(factor)  # row weights multiply the hidden states, which are shorter than rows of logits
        if rule.z_loss:  # a row has two different weights here, so they multiply the logits instead
            probabilities.mul_(factor + 2.0 * rule.z_loss * found * z_share[piece].unsqueeze(1))
            less, factor = factor, less
        if rule.label_smoothing > 0:
            probabilities.sub_(less * (rule.label_smoothing / weight.size(0)))
        probabilities.scatter_add_(1, wanted, (rule.label_smoothing - 1.0) * less)
        if rule.softcap > 0:
            probabilities.mul_(logits.div_(rule.softcap).square_().neg_().add_(1.0))
        made = probabilities.to(h.dtype)
        if rule.z_loss and rows is None:
            made.masked_fill_(~counted[piece].unsqueeze(1), 0.0)
        if wants_hidden:
            torch.mul(made @ weight, factor, out=grad_hidden[piece])
        if wants_weight:
            counting = (h * factor).to(h.dtype)
            if dtype == h.dtype:  # the first piece overwrites
                torch.addmm(grad_weight, made.t(), counting, beta=0.0 if start == 0 else 1.0, out=grad_weight)
            elif start == 0:
                grad_weight.copy_(made.t() @ counting)
            else:
                grad_weight += made.t() @ counting
        if wants_bias:
            grad_bias += factor.t().mm(probabilities).squeeze(0)
    if rows is not None:
        cross_entropy, logsumexp = (
            share.new_zeros(number).index_copy_(0, rows, each) for each in (cross_entropy, logsumexp)
        )
        if wants_hidden:
            grad_hidden = grad_hidden.new_zeros(number, hidden.size(1)).index_copy_(0, rows, grad_hidden)
    return cross_entropy, logsumexp, Gradients(grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype))


def _rows_of_a_piece(weight: Tensor, dtype: torch.dtype) -> int:
    row_bytes = weight.size(0) * dtype.itemsize
    if weight.device.type != "cpu":
        return max(_LEAST_ROWS, _CHUNK_BYTES // row_bytes)
    enough = max(_ENOUGH_ROWS_CPU, _ENOUGH_BYTES_CPU // row_bytes)
    return max(_LEAST_ROWS, min(_CHUNK_BYTES_CPU // row_bytes, enough))


class _Logits:
    """The logits of one piece after the other, and their softmax, in the same memory: fresh memory is slow on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None, softcap: float, dtype: torch.dtype, most_rows: int) -> None:
        """Allocate the memory. dtype: that of the logits handed out. softcap: 0 for none."""
        self._weight, self._bias, self._softcap = weight, bias, softcap
        shape = (most_rows, weight.size(0))
        self._product = weight.new_empty(shape)
        self._logits = self._product if dtype == weight.dtype else weight.new_empty(shape, dtype=dtype)
        # In place on the CPU, whose kernel writes a row after its last read of it. A softcap's slope needs the logits.
        in_place = weight.device.type == "cpu" and softcap == 0
        self._probabilities = self._logits if in_place else torch.empty_like(self._logits)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits (rows, classes) for hidden states (rows, hidden size); they are valid until the next call."""
        product, logits = self._product[: hidden.size(0)], self._logits[: hidden.size(0)]
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=product)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=product)
        return self._capped(product if logits.dtype == product.dtype else logits.copy_(product))

    def softmax(self, logits: Tensor, hidden: Tensor, target: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax of `logits`, which may be overwritten, and (rows, 1) logsumexp.

        A probability is exp(logit - logsumexp), which gives logsumexp from one logit and its probability.
        """
        on_cpu = logits.device.type == "cpu"
        if not on_cpu:
            target = logits.argmax(-1, keepdim=True)
            at_target = logits.gather(1, target)
        probabilities = self._probabilities[: logits.size(0)]
        torch.softmax(logits, -1, out=probabilities)
        probability = probabilities.gather(1, target)
        logsumexp = at_target - probability.log()
        if on_cpu:  # no search for the target, but it may be tiny
            lost = probability.squeeze(1) < _NEXT_TO_NOTHING
            if lost.any():
                again = torch.nn.functional.linear(hidden[lost], self._weight, self._bias).to(logits.dtype)
                logsumexp[lost] = torch.logsumexp(self._capped(again), -1, keepdim=True)
        return probabilities, logsumexp

    def _capped(self, logits: Tensor) -> Tensor:
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap > 0 else logits
