"""Copies of gradients into their places in a bucket, cast on the way.

On GPUs one launch moves all gradients (`buckets_triton`). Elsewhere, and for layouts or types that the kernel does not
take, torch's `_foreach_copy_` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepytorch.torch_internals import foreach_copy, has_triton_package

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
        """Return whether the kernel can move these into the slots.

        Each side must have one type and device, and the layouts must be equal.
        """
        if not self._alike or len(gradients) != len(self.views):
            return False
        dtype, device = gradients[0].dtype, self.views[0].device
        return dtype in DTYPES and all(
            each.dtype == dtype and each.device == device and each.stride() == stride and each.shape == shape
            for each, stride, shape in zip(gradients, self._strides, self._shapes, strict=True)
        )


def pack(gradients: Sequence[Tensor], bucket: Slots) -> None:
    """Write each gradient, rounded once, into its slot; asynchronous on GPUs, on the current stream.

    gradients: one for each slot, of its shape, in any floating-point type. Memory between the slots is not written.
    """
    if _on_gpu(gradients, bucket):
        from deepytorch.comm.kernels.buckets_triton import move

        move(gradients, bucket)
    elif gradients:
        foreach_copy(bucket.views, list(gradients))


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


def _on_gpu(gradients: Sequence[Tensor], bucket: Slots) -> bool:
    """Return whether the kernel takes this call; for one tensor, torch's own copy is enough."""
    if len(bucket.views) < 2 or not bucket.views[0].is_cuda:
        return False
    return has_triton_package() and not torch.cuda.is_current_stream_capturing() and bucket.fit(gradients)
