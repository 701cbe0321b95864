"""A few values of a tensor, to tell whether something wrote to it that leaves no version behind: `.data`, a kernel."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence

import torch

_SAMPLES = 256  # values of a tensor that are compared; gathering them takes about 4 us on CPU
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FEW, _ALTOGETHER = 16, 1024  # of each of many tensors, at least


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Up to 256 values of `tensor`, spread over it; None where its memory cannot be sampled."""
    if not (type(tensor) in _PLAIN and tensor.layout is torch.strided):
        return None
    return _spread(tensor, _SAMPLES).clone(memory_format=torch.contiguous_format)


class Sampler:
    """A few values of each of many tensors, gathered in one operation for each device and dtype.

    It is asked about the same tensors again and again, and keeps views of them for as long as they live. Values that
    stand side by side are taken: spread over the tensor they would cost a cache miss each, and `cat` would take long.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []  # empty as soon as one of them is gone
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._views: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples, to be given to `changed` with the same tensors."""
        if not self._knows(tensors):
            self._look_at(tensors)
        return [torch.cat(list(views.values())) for views in self._views.values()]

    def changed(
        self, tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], but: Container[int]
    ) -> Iterator[torch.Tensor]:
        """Those whose values are others now. but: ids of tensors that are left out."""
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
            bool(self._known)
            and self._ids == [id(each) for each in tensors]
            and self._addresses == [each.data_ptr() if type(each) in _PLAIN else 0 for each in tensors]
        )

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [weakref.ref(each, self._forget) for each in tensors]
        self._ids = [id(each) for each in tensors]
        self._addresses = [each.data_ptr() if type(each) in _PLAIN else 0 for each in tensors]
        self._views = {}
        values = max(_FEW, _ALTOGETHER // max(1, len(tensors)))
        for index, each in enumerate(tensors):
            view = _in_the_middle(each, values)
            if view is not None:
                self._views.setdefault((each.device, each.dtype), {})[index] = view

    def _forget(self, _: object) -> None:
        self._known, self._views = [], {}  # views would keep the memory of a model that is gone


def same_bits(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether two samples of a tensor are the same, bit by bit."""
    return after is not None and torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def _is_sampled(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _in_the_middle(tensor: torch.Tensor, values: int) -> torch.Tensor | None:
    """A view of at most so many values that stand side by side, in one dimension."""
    if not _is_sampled(tensor):
        return None
    view = tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if view.is_contiguous():
        view = view.view(-1)
    while view.dim() > 1:  # memory with holes in it: the row in the middle
        if view.numel() == 0:
            return None
        view = view[view.shape[0] // 2]
    view = view.reshape(1) if view.dim() == 0 else view
    count = min(values, view.shape[0])
    return view.narrow(0, (view.shape[0] - count) // 2, count)


def _spread(tensor: torch.Tensor, values: int) -> torch.Tensor:
    """Return a view of about so many values."""
    num_values = tensor.numel()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        steps = max(1, round((num_values / values) ** (1 / max(tensor.dim(), 1))))
        return tensor[(slice(None, None, steps),) * tensor.dim()]
    step = max(1, num_values // values) | 1  # odd, so that it walks over the columns of a matrix too
    count = (num_values + step - 1) // step
    return tensor.as_strided((count,), (step,), tensor.storage_offset())
