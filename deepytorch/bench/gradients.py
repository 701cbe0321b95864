"""The distance between the gradients of two copies of a model."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

# A gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise, and so is its relative
# difference. A gradient below this share of the whole gradient's norm is measured against that share instead: about
# 100 roundings of fp32. Stock torch.compile against eager: 0.85 for a key's bias of Bert without this, 4e-6 with it.
NOISE_SHARE = 1e-5


def max_relative_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest ||g - r|| / ||r|| over the parameters of `model` (gradient g) and `reference` (gradient r).

    Both have the same parameters; a missing gradient counts as zeros. NaN when any gradient is not finite.
    """
    gradients = [_gradient(parameter) for parameter in model.parameters()]
    wanted = [_gradient(parameter) for parameter in reference.parameters()]
    norms = torch.stack([r.norm() for r in wanted])
    floor = float(norms.norm()) * NOISE_SHARE + sys.float_info.min  # the minimum is for gradients that are all zero
    differences = torch.stack([(g - r).norm() for g, r in zip(gradients, wanted, strict=True)])
    return float((differences / norms.clamp_min(floor)).max())


def _gradient(parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.double()
