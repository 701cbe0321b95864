"""A few values of a tensor, to tell whether something wrote to it that leaves no version behind: `.data`, a kernel."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch

_SAMPLES = 256  # values of a tensor that are compared; gathering them takes about 4 us on CPU
_FEW = 16  # of each of many tensors: a cache miss each


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Up to 256 values of `tensor`, spread over it; None where its memory cannot be sampled."""
    view = _spread(tensor, _SAMPLES)
    return None if view is None else view.clone(memory_format=torch.contiguous_format)


class Samples:
    """Up to 16 values of each of many tensors, gathered in one operation for each device and dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._gathered = _gathered(tensors)

    def changed(self, but: Container[int]) -> Iterator[torch.Tensor]:
        """Those whose values are others now. but: ids of tensors that are left out."""
        now = _gathered(self._tensors)
        for index, each in enumerate(self._tensors):
            before = self._gathered.get(index)
            if before is not None and id(each) not in but and not same_bits(before, now.get(index)):
                yield each


def same_bits(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether two samples of a tensor are the same, bit by bit."""
    return after is not None and torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def _spread(tensor: torch.Tensor, values: int) -> torch.Tensor | None:
    """A view of about so many values."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    num_values = tensor.numel()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        steps = max(1, round((num_values / values) ** (1 / max(tensor.dim(), 1))))
        return tensor[(slice(None, None, steps),) * tensor.dim()]
    step = max(1, num_values // values) | 1  # odd, so that it walks over the columns of a matrix too
    count = (num_values + step - 1) // step
    return tensor.as_strided((count,), (step,), tensor.storage_offset())


def _gathered(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Samples by the place of their tensor."""
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for index, each in enumerate(tensors):
        view = _spread(each, _FEW)
        if view is not None:
            groups.setdefault((each.device, each.dtype), {})[index] = view.flatten()
    return {
        index: sample
        for views in groups.values()
        for index, sample in zip(
            views, torch.cat(list(views.values())).split([view.numel() for view in views.values()]), strict=True
        )
    }
