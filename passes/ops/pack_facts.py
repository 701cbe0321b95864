"""Facts of a mask and its labels in one launch: the places of tokens and labels, their counts per row, and violations.

`pack_facts` is for batches that only the device knows. The kernel writes every index tensor before the host has read a
number, at the size of the padded grid, so that a step waits for only one read, of `Packing.counts`. If the host knows
the batch, the host computes the same facts and sends them (`compiler.host_facts`), without a launch: faster still.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepytorch.torch_internals import has_triton_package

READINGS = ("nonzero", "zero", "not negative")  # those of `passes.unpad.masks`; the kernel takes their number
TOKENS, LABELS, STRAY, HOLES, LATE, ODD = range(6)  # rows of `Packing.counts`

_MASK_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_TARGET_DTYPES = {torch.int32, torch.int64}
_MOST_ENTRIES = 1 << 30  # offsets inside a grid are int32


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors that `pack_facts` writes, on the device.

    Only the first `counts[TOKENS].sum()` entries of `flat` and the first `counts[LABELS].sum()` entries of
    `labelled_flat` and `labelled_ranks` are valid.

    Attributes:
        mask: (rows, positions) bool.
        labelled: likewise; None without a target.
        counts: (6, rows) int32: tokens, labels, labels at pads, runs of tokens beyond the first, tokens right after a
            pad, values of the mask other than 0 and 1.
        flat: (rows * positions,) int64, row * positions + position of each token.
        ranks: (rows * positions,) int64, the number of tokens up to each position, minus one.
        labelled_flat: the place of each label in the grid.
        labelled_ranks: the place of each label among the tokens.
        cu_seqlens: (rows + 1,) int32.
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
    """The labels of a loss: `values` (rows, num) int64 or int32 stand at the positions from `offset` on.

    Other positions, and values equal to `ignore_index`, have no label.
    """

    values: Tensor
    ignore_index: int
    offset: int = 0


def takes(mask: Tensor, reading: str, target: Target | None = None) -> bool:
    """Return whether `pack_facts` accepts these: a grid on a CUDA device, of a supported dtype and size."""
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
    """Return the facts of one grid, without waiting for the device.

    Args:
        mask: (rows, positions) of any real dtype, any strides.
        reading: which of its values are tokens, one of `READINGS`.
        target: the labels on the same grid.
    """
    from deepytorch.passes.ops.pack_facts_triton import launch

    return launch(mask, READINGS.index(reading), target)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton_package()
