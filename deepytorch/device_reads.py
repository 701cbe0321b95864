"""What the host reads of a device's memory waits for everything that was launched before: who may, and how not to."""

from __future__ import annotations

import torch
from torch import Tensor


def read_would_sync(tensor: Tensor) -> bool:
    """Return whether the host would wait for a device to read values of `tensor`."""
    return tensor.device.type not in ("cpu", "meta")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is on the host, on `device`, without waiting: it goes by memory that the device reads itself."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # kept by its allocator until it is read
    return tensor.to(device, non_blocking=True)


class Later:
    """Values that were asked for and are looked at when they are there."""

    def __init__(self, value: Tensor) -> None:
        """value: is copied, so that it may change then."""
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._host.copy_(value, non_blocking=True)
        if value.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))
        elif value.device.type != "cpu":  # nothing that is known to tell when it is there
            self._host = value.cpu()

    def get(self) -> Tensor | None:
        """The values on the host; None where they are not there yet."""
        return self._host if self._event is None or self._event.query() else None
