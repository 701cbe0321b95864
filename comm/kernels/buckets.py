"""Copies of gradients into their places in a bucket and back, cast and scaled on the way.

On GPUs one launch moves all gradients (`buckets_triton`). Elsewhere, and for layouts or types that the kernel does not
take, torch's `_foreach` operators move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepytorch.torch_internals import foreach_copy, foreach_mul, has_triton_package

if TYPE_CHECKING:
    from deepytorch.comm.kernels.buckets_triton import Tables

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Slots:
    """Places of gradients in one or several buckets, with the tables that a launch keeps from one step to the next."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        """Keep the views, without a copy.

        views: of the buckets' memory, in the layouts of the gradients.
        """
        self.views = list(views)
        self.tables: Tables | None = None  # the kernel's, made at its first launch
        kinds = {(view.dtype, view.device) for view in views}
        self._alike = len(kinds) == 1 and views[0].dtype in DTYPES and all(map(is_dense, views))
        self._strides = [view.stride() for view in views]
        self._shapes = [view.shape for view in views]

    def fit(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether the kernel can move between these and the slots.

        Each side must have one type and device, and the layouts must be equal.
        """
        if not self._alike or len(gradients) != len(self.views):
            return False
        dtype, device = gradients[0].dtype, self.views[0].device
        return dtype in DTYPES and all(
            each.dtype == dtype and each.device == device and each.stride() == stride and each.shape == shape
            for each, stride, shape in zip(gradients, self._strides, self._shapes, strict=True)
        )


def pack(gradients: Sequence[Tensor], bucket: Slots, scale: float = 1.0, *, norm: bool = False) -> Tensor | None:
    """Write `scale * gradient`, rounded once, into each slot; asynchronous on GPUs, on the current stream.

    Args:
        gradients: one for each slot, of its shape, in any floating-point type. They are not changed.
        bucket: the slots. Memory between the slots is not written.
        scale: as a float32.
        norm: whether the squares of the written values, before rounding, are added up.

    Returns:
        The sum of squares, a float32 scalar on the gradients' device, the same bits in every run; None without `norm`.
    """
    if _on_gpu(gradients, bucket.views, bucket, plain=scale == 1.0 and not norm):
        from deepytorch.comm.kernels.buckets_triton import move

        return move(gradients, bucket.views, bucket, scale, norm=norm)
    return _foreach_move(gradients, bucket.views, scale, norm)


def unpack(bucket: Slots, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write `scale * slot`, rounded once, into each gradient: the reverse of `pack`."""
    if _on_gpu(gradients, bucket.views, bucket, plain=scale == 1.0):
        from deepytorch.comm.kernels.buckets_triton import move

        move(bucket.views, gradients, bucket, scale)
    else:
        _foreach_move(bucket.views, gradients, scale, norm=False)


def reference_move(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float = 1.0, norm: bool = False
) -> Tensor | None:
    """Compute the result of `pack` (gradients to slots) and `unpack` (slots to gradients) in plain torch."""
    scaled = [source.float() * scale for source in sources]
    for target, values in zip(targets, scaled, strict=True):
        target.copy_(values)
    return torch.stack([values.square().sum() for values in scaled]).sum() if norm else None


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements, in some order of the dimensions, lie one behind the other."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _on_gpu(gradients: Sequence[Tensor], slots: Sequence[Tensor], bucket: Slots, plain: bool) -> bool:
    """Return whether the kernel takes this call.

    plain: whether values are only copied, so that torch's own copy is enough for one tensor.
    """
    if not slots or not slots[0].is_cuda or (plain and len(slots) == 1):
        return False
    if not has_triton_package() or torch.cuda.is_current_stream_capturing() or not bucket.fit(gradients):
        return False
    return not moves_onto_itself(gradients, slots)


def moves_onto_itself(gradients: Sequence[Tensor], slots: Sequence[Tensor]) -> bool:
    """Return whether a gradient lies in its slot: trials of launch settings would scale it again.

    Tensors without elements have no address, and lie nowhere.
    """
    pairs = zip(gradients, slots, strict=True)
    return any(each.data_ptr() == slot.data_ptr() and each.numel() > 0 for each, slot in pairs)


def _foreach_move(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float, norm: bool) -> Tensor | None:
    if not sources:
        return torch.zeros(()) if norm else None
    values = list(sources)
    if scale != 1.0:
        values = list(foreach_mul([each.float() for each in sources], scale))
    foreach_copy(list(targets), values)
    return torch.stack([each.float().square().sum() for each in values]).sum() if norm else None
