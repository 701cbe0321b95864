"""Prefetching of batches to a device: a batch is copied while the one before is used, and the host keeps a copy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from deepytorch.compiler.host_copies import remember

Batch = TypeVar("Batch")


def prefetch(loader: Iterable[Batch], device: torch.device | str | int) -> Prefetched[Batch]:
    """Return the batches of `loader` on `device`, each copied while the one before is used.

    A training step then need not wait for the device to learn which positions are padding. Tensors are moved wherever
    they stand in a batch (mappings, lists, tuples, dataclasses); on CUDA by pinned memory and a stream of their own. On
    the CPU the batches are passed on as they are.

    The result is an iterable with the length of `loader`, and can be iterated as often as `loader`. An error of the
    loader is raised after the batches that came before it.
    """
    return Prefetched(loader, torch.device(device))


class Prefetched(Generic[Batch]):
    """The iterable that `prefetch` returns. loader: the source of batches. device: their destination."""

    def __init__(self, loader: Iterable[Batch], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        """Return the number of the loader's batches. Raises `TypeError` if the loader has no length."""
        if not hasattr(self.loader, "__len__"):
            raise TypeError(f"{type(self.loader).__name__}, which is prefetched, has no len()")
        return len(self.loader) if isinstance(self.loader, Collection) else self.loader.__len__()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the loader once."""
        if self.device.type == "cpu":
            yield from self.loader
            return
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        left = iter(self.loader)
        coming = _next(left, self.device, stream)
        while (batch := coming) is not None:
            given = batch.get()  # raises the loader's error; after this the loader may write to its memory again
            coming = _next(left, self.device, stream)
            yield given


class _Moved:
    """A batch that is being copied, or the error that came in its place."""

    def __init__(self, batch: Any, error: Exception | None = None, stream: torch.cuda.Stream | None = None) -> None:
        self._batch, self._error, self._stream = batch, error, stream
        self._copied = None if stream is None else stream.record_event()

    def get(self) -> Any:
        """Return the batch, for kernels that are launched from now on."""
        if self._error is not None:
            raise self._error
        if self._stream is not None and self._copied is not None:
            current = torch.cuda.current_stream(self._stream.device)
            self._copied.synchronize()  # no wait: the copy was launched a step ago on a stream of its own
            _map(self._batch, lambda tensor: _used_on(tensor, current))
        return self._batch


def _next(left: Iterator[Any], device: torch.device, stream: torch.cuda.Stream | None) -> _Moved | None:
    """Launch the copy of the next batch and return it; None behind the last one."""
    try:
        batch = next(left)
    except StopIteration:
        return None
    except Exception as error:  # raised later: the present batch is to be used first
        return _Moved(None, error)
    with torch.cuda.stream(stream):  # does nothing for None
        moved = _map(batch, lambda tensor: _copied(tensor, device))
    remember(moved, batch)
    return _Moved(moved, None, stream)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` with `function` applied to each of its tensors; other values are passed on."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        made = {key: _map(each, function) for key, each in batch.items()}
        return made if type(batch) is dict else _like(batch, made)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(each, function) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(each, function) for each in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, _map(getattr(batch, field.name), function))
        return changed
    return batch


def _like(batch: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Return a copy of the mapping `batch` with the entries `made`; its class and attributes are kept."""
    changed = copy.copy(batch)
    if hasattr(changed, "data") and isinstance(changed.data, dict):  # UserDict's, which a copy may share
        changed.data = made
        return changed
    try:
        for key, each in made.items():
            changed[key] = each  # type: ignore[index]
    except TypeError:
        return made
    return changed
