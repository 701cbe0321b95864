"""A few values of a tensor, to tell whether something wrote to it that leaves no version behind: `.data`, a kernel."""

from __future__ import annotations

import torch

_SAMPLES = 256  # values of a tensor that are compared; gathering them takes about 4 us on CPU


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Up to 256 values of `tensor`, spread over it; None where its memory cannot be sampled."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    num_values = tensor.numel()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        steps = max(1, round((num_values / _SAMPLES) ** (1 / max(tensor.dim(), 1))))
        return tensor[(slice(None, None, steps),) * tensor.dim()].clone(memory_format=torch.contiguous_format)
    step = max(1, num_values // _SAMPLES) | 1  # odd, so that it walks over the columns of a matrix too
    count = (num_values + step - 1) // step
    return tensor.as_strided((count,), (step,), tensor.storage_offset()).clone()


def same_bits(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether two samples of a tensor are the same, bit by bit."""
    return after is not None and torch.equal(before.view(torch.uint8), after.view(torch.uint8))
