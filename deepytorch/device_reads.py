"""Reads of a device's memory by the host, which wait for everything launched before, and ways to avoid the wait."""

from __future__ import annotations

import torch
from torch import Tensor

_HOST = frozenset(("cpu", "meta"))


def read_would_sync(*tensors: Tensor) -> bool:
    """Return whether the host would wait for a device to read values of one of `tensors`."""
    for each in tensors:  # noqa: SIM110 (`any` would make a call for each)
        if each.device.type not in _HOST:
            return True
    return False


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on `device`, without waiting: it goes by pinned memory, which the device reads itself."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # its allocator keeps the memory until the device has read it
    return tensor.to(device, non_blocking=True)


class Later:
    """Values of a device that the host reads later, once their copy has arrived."""

    def __init__(self, value: Tensor) -> None:
        """Begin to copy `value`, which may be changed afterwards."""
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._host.copy_(value, non_blocking=True)
        if value.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))
        elif value.device.type != "cpu":  # other devices have no known event for the arrival of a copy
            self._host = value.cpu()

    def get(self) -> Tensor | None:
        """Return the values on the host; None if they have not arrived yet."""
        return self._host if self._event is None or self._event.query() else None
