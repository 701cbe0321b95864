"""The form of `linear_cross_entropy` for CUDA: large matrix products, and Triton for what lies between them.

Sizes: N rows, hidden size H, V classes; s bytes per element. Products are 6 N H V flops, forward and backward together
(12.9 TFLOP at 4,096 x 4,096 x 128,256). Everything else is traffic: products have to be large and few, and no logits
computed twice. The logits have to be stored until their row's logsumexp is known. Ways to do that, for bf16:

- **Pieces of rows** (as in `linear_cross_entropy_chunked`): five pieces in 256 MB. The weight's gradient is summed
  over them in fp32: 4 V H bytes of memory (2.1 GB), written once, read and written 4 times (19 GB, 4 ms on an H200).
- **Pieces of classes, logits computed twice**: 8 N H V flops (6 ms more); no sums except the gradient of hidden.
- **Logits in the memory of the weight's gradient** (this form): its V H places hold H rows of logits. Classes are cut
  into pieces of P; the gradient of a piece's weight, P H elements, overwrites the logits of the previous piece, which
  have been used by then. 6 N H V flops, and the gradient's storage is longer by one piece.
- **A product with the softmax in it** saves writing and reading the logits in the forward only (0.4 ms), and would have
  to be as fast as the library's products, which take 17 ms at 750 TFLOP/s.

So, if N <= H (<= 2 H in float16, whose gradients are held in fp32):

1. for each piece: logits = hidden weight^T, N x P
2. one kernel, one program per row: logsumexp in one sweep, the gradient of the logits in place in a second one. Read
   twice (from L2 the second time, if rows in flight fit in it), written once: 3 N V s bytes, 3.2 GB, 0.8 ms
3. for each piece: grad_hidden += grad_logits weight in fp32 (8 N H bytes a piece, 2 GB in all), and
   grad_weight = grad_logits^T hidden, final

More rows are handled in chunks of H; the weight's gradient is summed over the chunks in fp32, and the low-precision
gradient, which is not needed yet, holds the logits. If the weight has no gradient, rows are handled in pieces of
`_SCRATCH_BYTES` of logits. A loss per row gets its gradients in the backward, where logsumexp is known: in pieces of
classes, of all rows.

**Memory** beyond inputs, gradients and fp32 sums, at 4,096 x 4,096 x 128,256 in bf16: 69 MB at the end of the weight's
gradient (P H s, P = 8,448), 34 MB when the gradient of hidden is cast, and 34 MB more when rows are put in order: 137
MB at most, and nothing of the weight's size in fp32. If V is no multiple of 8, up to N P s (69 MB) more, for aligned
rows in the last piece. Without gradients: 201 MB of logits.

**Ignored rows**: the host never waits for their number. Either products are the library's, over all rows, with a
gradient of 0 for ignored rows; or they are `product`, for which the rows that count are put first: programs beyond
their number, which stays on the device, return at once. `fastest` measures both on the rows of the first batch, whose
share of ignored rows is read from the device then, once. All figures here are computed; none is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from deepytorch.passes.ops.linear_cross_entropy_chunked import (
    NO_GRADIENTS,
    Call,
    Gradients,
    LossRule,
    RowWeights,
    gradient_dtype,
    loss_of,
    losses_of_rows,
    row_weights,
)
from deepytorch.passes.ops.linear_cross_entropy_kernels import FLOAT32, SETTINGS, Setting, Tile, product, softmax_rows
from deepytorch.tuning import fastest, measures_nothing

_SCRATCH_BYTES = 192 << 20  # of logits, if the weight has no gradient whose memory could hold them
# Tiles of 128 x 256 of a product of 4,096 rows or columns: 8 waves on 132 multiprocessors, of an H100 or H200.
_PIECE_CLASSES = 64 * 132
_ALIGNED = 16  # elements; rows that begin at a multiple of it are loaded with wide loads
_FLOAT16_SCALE = 64.0  # scale of a gradient of logits: most are below float16's least normal number


class _Rows(NamedTuple):
    """The rows of a sweep, and their weights. Tensors follow `order` if it is given.

    Attributes:
        hidden: (tokens, hidden size), the hidden states.
        order: (tokens,) the rows' places, with those that count first; None if rows stay in place.
        number: () the number of rows that count.
        target: (tokens,) negative where ignored.
        weights: the rows' weights in the loss.
        factor: (tokens,) fp32, the factor of the cross-entropy's gradient of logits.
        z_factor: (tokens,) fp32, likewise for the z-loss.
        unscale: () the factor of all gradients at the end; None for 1.
    """

    hidden: Tensor
    order: Tensor | None
    number: Tensor
    target: Tensor
    weights: RowWeights
    factor: Tensor
    z_factor: Tensor
    unscale: Tensor | None


def forward(call: Call, gradients: Sequence[bool], setting: Setting | None = None) -> tuple[Tensor, Gradients, Tensor]:
    """Return the same as `linear_cross_entropy_chunked.forward`, for half precision or float32.

    setting: used instead of the fastest setting.
    """

    def run(setting: Setting) -> tuple[Tensor, Gradients, Tensor]:
        rows = _rows(call, row_weights(call), setting)
        wants = NO_GRADIENTS if call.is_by_row else gradients
        cross_entropy, logsumexp, made = _sweep(rows, call, wants, setting)
        losses = losses_of_rows(cross_entropy, logsumexp, rows.weights, call.rule.z_loss)
        if call.is_by_row:
            losses, logsumexp = (_placed_back(each, rows.order) for each in (losses, logsumexp))
        loss = loss_of(losses, rows.weights, call)
        return loss, made, logsumexp if call.is_by_row else logsumexp.new_empty(0)

    with torch.cuda.device_of(call.hidden):
        return run(setting or _setting("forward" if any(gradients) else "loss", call, run))


def backward(
    call: Call, grad_loss: Tensor, logsumexp: Tensor, gradients: Sequence[bool], setting: Setting | None = None
) -> Gradients:
    """Return the same as `linear_cross_entropy_chunked.backward`, given logsumexp (tokens,) from `forward`."""

    def run(setting: Setting) -> Gradients:
        rows = _rows(call, row_weights(call, grad_loss), setting)
        ordered = logsumexp if rows.order is None else logsumexp[rows.order]
        return _sweep_classes(rows, call, ordered, gradients, setting)

    with torch.cuda.device_of(call.hidden):
        return run(setting or _setting("backward", call, run))


def _rows(call: Call, weights: RowWeights, setting: Setting) -> _Rows:
    order = None
    hidden, target = call.hidden.contiguous(), call.target.masked_fill(~weights.counted, -1)
    if setting.tile is not None:
        order = torch.sort((~weights.counted).to(torch.uint8), stable=True).indices
        hidden, target = hidden.index_select(0, order), target[order]
        safe, counted, share, z_share = (each[order] for each in weights[:-1])
        weights = RowWeights(safe, counted, share, z_share, weights.nothing)
    factor, z_factor, unscale = weights.share, call.rule.z_loss * weights.z_share, None
    if hidden.dtype == torch.float16 and hidden.size(0):
        # gradients of logits use float16's range well, whatever the rows' weights
        most = torch.maximum(factor.abs().amax(), z_factor.abs().amax())
        unscale = most.where(most != 0, 1.0) / _FLOAT16_SCALE
        factor, z_factor = factor / unscale, z_factor / unscale
    return _Rows(
        hidden, order, weights.counted.sum(), target, weights, factor.contiguous(), z_factor.contiguous(), unscale
    )


def _placed_back(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


class _Pieces(NamedTuple):
    """Memory for logits: a view of (rows, classes) for each piece of classes.

    stride: elements from one piece to the next.
    """

    views: list[Tensor]
    stride: int


def _pieces(flat: Tensor, num_rows: int, num_classes: int, width: int, stride: int) -> _Pieces:
    views = []
    for number in range(-(-num_classes // width)):
        last = min(width, num_classes - number * width)
        if last % 8:  # unaligned rows are slow
            views.append(flat.new_empty(num_rows, _multiple(last, 8))[:, :last])
        else:
            views.append(flat[number * stride : number * stride + num_rows * last].view(num_rows, last))
    return _Pieces(views, stride)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _sweep(rows: _Rows, call: Call, gradients: Sequence[bool], setting: Setting) -> tuple[Tensor, Tensor, Gradients]:
    """Return (tokens,) cross-entropy and logsumexp in fp32, 0 where ignored, and gradients."""
    hidden, weight = rows.hidden, call.weight
    (num_rows, size), num_classes = hidden.shape, weight.size(0)
    wants_hidden, wants_weight, wants_bias = gradients
    out_dtype = gradient_dtype(hidden.dtype)
    cross_entropy, logsumexp = (hidden.new_zeros(num_rows, dtype=torch.float32) for _ in range(2))
    grad_hidden = hidden.new_empty((num_rows, size) if wants_hidden else 0, dtype=out_dtype)
    grad_bias = weight.new_zeros(num_classes if wants_bias else 0, dtype=torch.float32)
    grad_weight, total = weight.new_empty(0, dtype=out_dtype), None
    if wants_weight:
        width = min(_PIECE_CLASSES, num_classes)
        held = size * (out_dtype.itemsize // hidden.dtype.itemsize)  # rows of logits that fit in the gradient
        if num_rows <= held:
            # one piece longer: a piece's gradient overwrites the logits of the previous piece
            store = weight.new_empty((width + num_classes) * size, dtype=out_dtype)
            flat = store[width * size :].view(hidden.dtype)
        else:
            total = weight.new_zeros(num_classes, size, dtype=torch.float32)
            store, held = weight.new_empty(num_classes * size), size
            flat = store
        grad_weight = store[: num_classes * size].view(num_classes, size)
        step, stride = held, width * held
    else:
        width = num_classes
        step = max(_ALIGNED, _SCRATCH_BYTES // (_multiple(width, 8) * hidden.itemsize) // _ALIGNED * _ALIGNED)
        flat, stride = weight.new_empty(min(step, num_rows) * width if width % 8 == 0 else 0), 0
    if step % _ALIGNED == 0 and num_rows > step:  # pieces of equal size
        step = _multiple(-(-num_rows // -(-num_rows // step)), _ALIGNED)
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        count = (rows.number - start).clamp(0, part.stop - start)
        multiply = _Products(setting.tile, count)
        h, room = hidden[part], _pieces(flat, part.stop - start, num_classes, width, stride)
        for number, logits in enumerate(room.views):
            multiply(h, weight[number * width :][: logits.size(1)].t(), logits)
        _launch(
            room, call.bias, rows, part, count, cross_entropy[part], logsumexp[part], call.rule, num_classes, setting,
            known=False, gradients=any(gradients), exits=not wants_bias,
        )  # fmt: skip
        summed = hidden.new_zeros(h.shape if wants_hidden else 0, dtype=torch.float32)
        for number, made in enumerate(room.views if any(gradients) else ()):
            classes = slice(number * width, number * width + made.size(1))
            if wants_hidden:
                multiply(made, weight[classes], summed, add=True)
            if wants_bias:
                grad_bias[classes] += made.sum(0, dtype=torch.float32)
            if wants_weight:
                out = grad_weight if total is None else total
                multiply(made.t(), h, out[classes], add=total is not None, inner_counted=True)
        if wants_hidden:
            _put(grad_hidden, rows, part, summed)
    if wants_weight and num_rows == 0:
        grad_weight.zero_()
    if total is not None:
        grad_weight = total if out_dtype == torch.float32 else grad_weight.copy_(total)
    return cross_entropy, logsumexp, _finished(rows, grad_hidden, grad_weight, grad_bias.to(out_dtype))


def _sweep_classes(
    rows: _Rows, call: Call, logsumexp: Tensor, gradients: Sequence[bool], setting: Setting
) -> Gradients:
    """Return the gradients for a known logsumexp: a piece of classes at a time, of all rows."""
    hidden, weight, bias = rows.hidden, call.weight, call.bias
    (num_rows, size), num_classes = hidden.shape, weight.size(0)
    wants_hidden, wants_weight, wants_bias = gradients
    out_dtype = gradient_dtype(hidden.dtype)
    grad_hidden = hidden.new_empty((num_rows, size) if wants_hidden else 0, dtype=out_dtype)
    grad_weight = weight.new_empty(weight.shape if wants_weight else 0, dtype=out_dtype)
    grad_bias = weight.new_zeros(num_classes if wants_bias else 0, dtype=out_dtype)
    summed = hidden.new_zeros(hidden.shape if wants_hidden else 0, dtype=torch.float32)
    multiply = _Products(setting.tile, rows.number)
    most = _SCRATCH_BYTES // (hidden.itemsize * max(num_rows, 1)) // 64 * 64
    width = min(num_classes, max(64, min(_PIECE_CLASSES, most)))
    flat = weight.new_empty(num_rows * width)
    everything, nothing = slice(0, num_rows), logsumexp
    for first in range(0, num_classes if num_rows else 0, width):
        classes = slice(first, min(first + width, num_classes))
        room = _pieces(flat, num_rows, classes.stop - first, width, 0)
        [made] = room.views
        multiply(hidden, weight[classes].t(), made)
        _launch(
            room, None if bias is None else bias[classes], rows, everything, rows.number, nothing, logsumexp,
            call.rule, num_classes, setting, known=True, gradients=True, exits=not wants_bias, first=first,
        )  # fmt: skip
        if wants_hidden:
            multiply(made, weight[classes], summed, add=True)
        if wants_bias:
            grad_bias[classes] = made.sum(0, dtype=torch.float32)
        if wants_weight:
            multiply(made.t(), hidden, grad_weight[classes], inner_counted=True)
    if wants_weight and num_rows == 0:
        grad_weight.zero_()
    if wants_hidden:
        _put(grad_hidden, rows, everything, summed)
    return _finished(rows, grad_hidden, grad_weight, grad_bias)


def _put(grad_hidden: Tensor, rows: _Rows, part: slice, summed: Tensor) -> None:
    if rows.order is None:
        grad_hidden[part] = summed
    else:
        grad_hidden.index_copy_(0, rows.order[part], summed.to(grad_hidden.dtype))


def _finished(rows: _Rows, *made: Tensor) -> Gradients:
    if rows.unscale is not None:
        for each in made:
            each.mul_(rows.unscale)
    return Gradients(*made)


class _Products:
    """Matrix products: the library's, or `product`, in which only the first `count` rows count."""

    def __init__(self, tile: Tile | None, count: Tensor) -> None:
        self._tile, self._count = tile, count

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False, inner_counted: bool = False) -> None:
        """Write a b to `out`, or add it. inner_counted: whether `count` limits a's columns, not its rows."""
        if self._tile is None:
            _multiply(a, b, out, add)
            return
        tile = self._tile
        if out.dtype == torch.float32 and tile.columns > FLOAT32.columns:
            tile = FLOAT32
        (m, k), n = a.shape, b.size(1)
        product[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
            a, b, out, self._count, m, n, k, *a.stride(), *b.stride(), out.stride(0),
            INNER_COUNTED=inner_counted, ADD=add, WIDE=a.device.type == "cpu",
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.device.type != "cuda":  # the interpreter runs on CPU, where half precision is not multiplied into fp32
        made = a.float() @ b.float()
        out.add_(made) if add else out.copy_(made)
    elif add:
        try:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        except RuntimeError:  # this torch can only add to a result in a's dtype
            out.add_(torch.mm(a, b, out_dtype=out.dtype))
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _launch(
    room: _Pieces,
    bias: Tensor | None,
    rows: _Rows,
    part: slice,
    count: Tensor,
    cross_entropy: Tensor,
    logsumexp: Tensor,
    rule: LossRule,
    all_classes: int,
    setting: Setting,
    *,
    known: bool,
    gradients: bool,
    exits: bool,
    first: int = 0,
) -> None:
    """Launch `softmax_rows` on the contents of `room`.

    first: the first class there. exits: ignored rows may stay unchanged.
    """
    target, last = rows.target[part], room.views[-1]
    if known:  # relative to the classes of this piece; a target in another piece matches none of them
        target = (target - first).where(target >= 0, -1)
        target = target.where((target >= 0) | (rows.target[part] < 0), 1 << 40)
    softmax_rows[(target.size(0),)](
        room.views[0], last, last if bias is None else bias, target, rows.factor[part], rows.z_factor[part], count,
        cross_entropy, logsumexp, sum(each.size(1) for each in room.views), room.views[0].size(1), room.stride,
        last.stride(0), 1.0 - rule.label_smoothing, rule.label_smoothing / all_classes, rule.softcap,
        HAS_BIAS=bias is not None, SMOOTHED=rule.label_smoothing > 0, CAPPED=rule.softcap > 0, Z=rule.z_loss > 0,
        ORDERED=rows.order is not None and exits, KNOWN=known, GRADIENTS=gradients, BLOCK=setting.block,
        num_warps=setting.num_warps,
    )  # fmt: skip


_CHOSEN: dict[tuple[object, ...], Setting] = {}


def _setting(kind: str, call: Call, launch: Any) -> Setting:
    """Return the fastest setting, measured once per process.

    The measurement reads the share of ignored rows from the device.
    """
    hidden, weight = call.hidden, call.weight
    usable = [each for each in SETTINGS if each.tile is None or _takes_tiles(hidden, weight)]
    if hidden.device.type != "cuda" or hidden.size(0) == 0:
        return usable[0]
    num_rows, num_classes = (1 << (size - 1).bit_length() for size in (hidden.size(0), weight.size(0)))
    key = (kind, hidden.device, hidden.dtype, hidden.size(1), num_classes, num_rows, len(usable))
    if key not in _CHOSEN:
        if measures_nothing():
            return usable[0]
        quarters = round(4 * float((call.target != call.rule.ignore_index).float().mean()))
        shape_class = f"{kind} {hidden.dtype} H{hidden.size(1)} V{num_classes} N{num_rows} counted {quarters}/4"
        _CHOSEN[key] = fastest("linear_cross_entropy/1", shape_class, usable, launch)
    return _CHOSEN[key]


def _takes_tiles(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether `product` can multiply these: in half precision, with offsets in 32 bits."""
    return hidden.dtype != torch.float32 and weight.is_contiguous() and hidden.numel() < 1 << 31
