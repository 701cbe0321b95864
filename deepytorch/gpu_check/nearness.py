"""The distance that results may have from the exact ones: not much further than eager's in the same dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepytorch.gpu_check.outcome import Failed

_OF_EAGERS = 3.0  # allowed error, in multiples of eager's error in that dtype: the rule of PyTorch's own benchmarks
_SLACK = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the norm of the exact values


def as_near(
    names: Sequence[str], exact: Sequence[Tensor], eager: Sequence[Tensor], ours: Sequence[Tensor], dtype: torch.dtype
) -> str:
    """Return in words how far ours is from the exact values.

    Raises `Failed` if that is more than `_OF_EAGERS` times as far as eager, plus `_SLACK`.
    """
    worst = 0.0
    for name, wanted, theirs, found in zip(names, exact, eager, ours, strict=True):
        wanted = wanted.double()
        off, eager_off = (float((each.double() - wanted).norm()) for each in (found, theirs))
        worst = max(worst, within(name, off, eager_off, float(wanted.norm()), dtype))
    return f"off by {worst:.1e} at most"


def within(name: str, off: float, eager_off: float, norm: float, dtype: torch.dtype) -> float:
    """Return `off` relative to the norm of the exact values. Raises `Failed` as `as_near` does."""
    limit = _OF_EAGERS * eager_off + _SLACK[dtype] * norm
    if not off <= limit:
        raise Failed(f"{name} is off by {off:.3g}; {limit:.3g} allowed, eager is off by {eager_off:.3g}")
    return off / norm
