"""Samples of tensor values that detect writes without a version count, such as through `.data` or by a kernel."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence

import torch

_SAMPLES = 256  # values compared for one tensor; gathering them takes about 4 us on CPU
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FEW, _ALTOGETHER = 16, 1024  # values for each of many tensors at least, and for all of them together


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return up to 256 values of `tensor`, spread over it, or None if its memory cannot be sampled."""
    view = _spread_of(tensor)
    return None if view is None else view.clone(memory_format=torch.contiguous_format)


class Sampler:
    """Samples of many tensors, gathered in one operation for each device and dtype.

    A sampler is asked about the same tensors again and again, and keeps views of the tensors as long as they live. The
    sampled values of a tensor are adjacent: values spread over a tensor would cost a cache miss each, and `cat` would
    be slow.
    """

    def __init__(self, *, spread: bool = False) -> None:
        """Start without tensors. spread: take up to 256 values of each, spread over it: finer, for few tensors."""
        self._is_spread = spread
        self._known: list[weakref.ref[torch.Tensor]] = []  # emptied as soon as one of the tensors is freed
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._views: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return samples of `tensors`, to be given to `changed` together with the same tensors."""
        if not self._knows(tensors):
            self._look_at(tensors)
        return [torch.cat(list(views.values())) for views in self._views.values()]

    def changed(
        self, tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], but: Container[int]
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors whose values differ from the samples `before`. but: ids of tensors to leave out."""
        now = self.take(tensors)
        if len(now) != len(before):
            yield from (each for each in tensors if id(each) not in but)
            return
        for views, old, new in zip(self._views.values(), before, now, strict=True):
            if old.numel() == new.numel() and same_bits(old, new):
                continue
            counts = [view.numel() for view in views.values()]
            if old.numel() != new.numel():
                yield from (tensors[index] for index in views if id(tensors[index]) not in but)
                continue
            for index, one, other in zip(views, old.split(counts), new.split(counts), strict=True):
                if id(tensors[index]) not in but and not same_bits(one, other):
                    yield tensors[index]

    def _knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        return (
            bool(self._known) and self._ids == [id(each) for each in tensors] and self._addresses == _addresses(tensors)
        )

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [weakref.ref(each, self._forget) for each in tensors]
        self._ids = [id(each) for each in tensors]
        self._addresses = _addresses(tensors)
        self._views = {}
        values = max(_FEW, _ALTOGETHER // max(1, len(tensors)))
        for index, each in enumerate(tensors):
            spread = self._is_spread and each.is_contiguous()  # else it would be a copy
            view = _spread_of(each) if spread else _in_the_middle(each, values)
            if view is not None:
                self._views.setdefault((each.device, each.dtype), {})[index] = view

    def _forget(self, _: object) -> None:
        self._known, self._views = [], {}  # views would keep the memory of a freed model alive


def same_bits(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Return whether two samples of a tensor are equal, bit by bit."""
    return after is not None and torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [each.data_ptr() if type(each) in _PLAIN else 0 for each in tensors]


def _is_sampled(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _in_the_middle(tensor: torch.Tensor, values: int) -> torch.Tensor | None:
    """Return a one-dimensional view of at most `values` adjacent values from the middle of `tensor`."""
    if not _is_sampled(tensor):
        return None
    view = tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if view.is_contiguous():
        view = view.view(-1)
    while view.dim() > 1:  # not contiguous: take the row in the middle
        if view.numel() == 0:
            return None
        view = view[view.shape[0] // 2]
    view = view.reshape(1) if view.dim() == 0 else view
    count = min(values, view.shape[0])
    return view.narrow(0, (view.shape[0] - count) // 2, count)


def _spread_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of up to 256 values, spread over `tensor`; None if its memory cannot be sampled."""
    if not _is_sampled(tensor):
        return None
    values, num_values = _SAMPLES, tensor.numel()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        steps = max(1, round((num_values / values) ** (1 / max(tensor.dim(), 1))))
        return tensor[(slice(None, None, steps),) * tensor.dim()]
    step = max(1, num_values // values) | 1  # odd, so that samples of a matrix fall into different columns
    count = (num_values + step - 1) // step
    return tensor.as_strided((count,), (step,), tensor.storage_offset())
