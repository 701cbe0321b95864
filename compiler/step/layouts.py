"""The layout in memory of gradients: that of what they are gradients of, as in eager.

Convolutions with the channels of images innermost, in compiled code too, give gradients of weights and images in that
layout. `param.grad` gets the layout of the weight anyway; hooks and `torch.autograd.grad` are given what the backward
returns, and a script may call `view` on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def has_ordered_gradient(value: Any) -> bool:
    """Return whether a value is an image, or a weight for some, whose gradient eager would give row by row."""
    return (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.dim() in (4, 5)
        and value.layout is torch.strided
        and value.is_contiguous()
    )


def ordered(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, copied if its channels are innermost."""
    innermost = torch.channels_last if gradient.dim() == 4 else torch.channels_last_3d
    return gradient.contiguous() if gradient.is_contiguous(memory_format=innermost) else gradient


def with_ordered_gradients(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a call, aliases of those for which the layout of the gradient matters."""
    given = list(inputs)
    for place, each in enumerate(inputs):
        if has_ordered_gradient(each):
            given[place] = each.view_as(each)
            given[place].register_hook(ordered)
    return given
