"""One backward watched: when its gradients came, and what their buckets then took one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from deepytorch.comm.buckets import Arrival
from deepytorch.comm.cost import Link


class Watch:
    """Times of one backward, from its first gradient on: on a GPU those of its stream, on a CPU those of the clock."""

    def __init__(self, device: torch.device) -> None:
        """Begin now. device: where the gradients are."""
        self._device = device
        self._began = self._mark()
        self._arrivals: list[tuple[tuple[int, ...], Any]] = []
        self._ended: Any = None

    def arrived(self, members: Iterable[int]) -> None:
        """These gradients have just come, for the first time."""
        found = tuple(members)
        if found:
            self._arrivals.append((found, self._mark()))

    def ended(self) -> None:
        """The backward is over."""
        self._ended = self._mark()

    def backward_us(self) -> float:
        """From the first gradient to the end."""
        return self._us(self._ended)

    def arrivals(self, all_members: int) -> list[Arrival]:
        """Every member once: those that did not come stand at the end."""
        seen = {member for members, _ in self._arrivals for member in members}
        late = tuple(member for member in range(all_members) if member not in seen)
        found = [Arrival(members, self._us(mark)) for members, mark in self._arrivals]
        return [*found, Arrival(late, self.backward_us())] if late else found

    def finish(self) -> float:
        """Seconds on the clock, when nothing is under way on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def _us(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return 1e6 * float(mark - self._began)
        mark.synchronize()
        return 1e3 * float(self._began.elapsed_time(mark))


def fitted(assumed: Link, num_bytes: int, num_transfers: int, seconds: float) -> Link:
    """`assumed` with the rate that was seen; its latency is kept, as transfers of about one size do not show it."""
    left_us = max(1e6 * seconds - num_transfers * assumed.latency_us, 0.1e6 * seconds)
    return Link(assumed.latency_us, left_us / max(num_bytes, 1))
