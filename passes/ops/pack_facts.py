"""Of a mask and its labels in one launch: where tokens and labels stand, how many a row has, what must not be there.

For batches that only a device knows: `pack_facts` writes every index tensor before the host has read a number, at the
size of the padded grid, so that one read of `Packing.counts` is all that a step waits for. Where the host knows the
batch it computes the same and sends it (`compiler.host_facts`), with no launch at all; that is faster still.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepytorch.torch_internals import has_triton_package

READINGS = ("nonzero", "zero", "not negative")  # those of `passes.unpad.masks`, by the number that the kernel takes
TOKENS, LABELS, STRAY, HOLES, LATE, ODD = range(6)  # rows of `Packing.counts`

_MASK_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_TARGET_DTYPES = {torch.int32, torch.int64}
_MOST_ENTRIES = 1 << 30  # offsets inside a grid are int32


@dataclass(frozen=True, slots=True)
class Packing:
    """What `pack_facts` writes, on the device. The first `counts[TOKENS].sum()` entries of `flat` and the first
    `counts[LABELS].sum()` of `labelled_flat` and `labelled_ranks` are there, what follows is not.

    mask: (rows, positions) bool. labelled: likewise, None without a target. counts: (6, rows) int32: tokens, labels,
    labels at pads, runs of tokens beyond the first, tokens right behind a pad, values of the mask besides 0 and 1.
    flat: (rows * positions,) int64, row * positions + position of each token. ranks: likewise, how many tokens there
    are up to each position, less one. labelled_flat, labelled_ranks: of each label, where it stands in the grid and
    among the tokens. cu_seqlens: (rows + 1,) int32.
    """

    mask: Tensor
    labelled: Tensor | None
    counts: Tensor
    flat: Tensor
    ranks: Tensor
    labelled_flat: Tensor
    labelled_ranks: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """Labels of a loss: `values` (rows, num) int64 or int32 stand at the positions from `offset` on; elsewhere and at
    `ignore_index` there is none.
    """

    values: Tensor
    ignore_index: int
    offset: int = 0


def takes(mask: Tensor, reading: str, target: Target | None = None) -> bool:
    """Whether `pack_facts` takes these: a grid on a CUDA device, of a dtype and size that the kernel was made for."""
    if not _has_kernels(mask.device) or reading not in READINGS:
        return False
    if mask.dim() != 2 or mask.dtype not in _MASK_DTYPES or not 0 < mask.numel() <= _MOST_ENTRIES:
        return False
    if target is None:
        return True
    values, (rows, positions) = target.values, mask.shape
    fits = values.dim() == 2 and values.size(0) == rows and 0 <= target.offset <= positions - values.size(1)
    return (
        fits
        and values.dtype in _TARGET_DTYPES
        and values.device == mask.device
        and -(1 << 31) <= target.ignore_index < 1 << 31
    )


def pack_facts(mask: Tensor, reading: str, target: Target | None = None) -> Packing:
    """The facts of one grid, without waiting for the device.

    Args:
        mask: (rows, positions) of any real dtype, any strides.
        reading: which of its values are tokens, one of `READINGS`.
        target: the labels on the same grid.
    """
    from deepytorch.passes.ops.pack_facts_triton import launch

    return launch(mask, READINGS.index(reading), target)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton_package()
