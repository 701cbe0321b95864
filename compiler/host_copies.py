"""Host copies of batches that were moved to a device, so that a step reads a batch without waiting for the device.

A moved tensor is looked up by its identity, held weakly, with its version: an in-place write ends the entry, and
slices, views and copies are other tensors, of which nothing is known. The host copy is our own, since loaders write the
next batch into the same memory, through numpy even without a trace. Writes through `.data`, and by kernels that do not
tell autograd, are not seen: a batch that is written in such a way has to be moved by hand.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepytorch.switch import SWITCH

# Enough for ids, masks and labels of any batch, not for its images. Such a copy takes well under a millisecond.
_MOST_BYTES = 8 << 20


class _Known(NamedTuple):
    moved: weakref.ref[Tensor]
    version: int
    held: Tensor  # on the host


# By the id of the moved tensor. While it is empty, nobody has to ask `host_copy`.
KNOWN: dict[int, _Known] = {}


def host_copy(tensor: Tensor) -> Tensor | None:
    """Return the values of `tensor`, which is on a device, on the host; None if unknown. Do not write to the result."""
    known = KNOWN.get(id(tensor))
    if known is None or known.moved() is not tensor:
        return None
    if tensor._version != known.version:
        del KNOWN[id(tensor)]
        return None
    return known.held


def remember(moved: Any, origin: Any) -> None:
    """Note that the tensors of `moved` are copies on a device of those of `origin`, a batch of the same structure."""
    if moved is origin:
        return
    if isinstance(origin, Tensor):
        if isinstance(moved, Tensor):
            _remember(moved, origin)
    elif isinstance(origin, Mapping):
        if isinstance(moved, Mapping):
            for key, each in origin.items():
                if key in moved:
                    remember(moved[key], each)
    elif isinstance(origin, list | tuple):
        if isinstance(moved, list | tuple) and len(moved) == len(origin):
            for each, other in zip(moved, origin, strict=True):
                remember(each, other)
    elif dataclasses.is_dataclass(origin) and type(moved) is type(origin):
        for field in dataclasses.fields(origin):
            remember(getattr(moved, field.name, None), getattr(origin, field.name, None))


def _remember(moved: Tensor, origin: Tensor) -> None:
    if type(moved) is not Tensor or type(origin) is not Tensor or origin.device.type != "cpu":
        return
    if moved.shape != origin.shape or moved.dtype != origin.dtype or origin.layout is not torch.strided:
        return
    if origin.nbytes > _MOST_BYTES or moved.requires_grad or moved.is_inference():
        return
    name = id(moved)

    def forget(gone: weakref.ref[Tensor]) -> None:
        known = KNOWN.get(name)
        if known is not None and known.moved is gone:
            del KNOWN[name]

    KNOWN[name] = _Known(weakref.ref(moved, forget), moved._version, origin.detach().clone())


def remembering(move: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `move(batch, ...)`, which moves a batch to a device, so that the tensors of its result are remembered."""

    def moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = move(batch, *args, **kwargs)
        if SWITCH.enabled:
            remember(found, batch)
        return found

    return moved
