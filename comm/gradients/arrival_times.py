"""One backward watched: when its gradients came, and what their buckets then took one after the other."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

import torch

from deepytorch.comm.gradients.buckets import Arrival
from deepytorch.comm.topology.cost import Link


class ArrivalTimes:
    """Times of one backward, from its first gradient on: on a GPU those of its stream, on a CPU those of the clock."""

    def __init__(self, device: torch.device) -> None:
        """Begin now. device: where the gradients are."""
        self._device = device
        self._began = self._mark()
        self._arrivals: list[tuple[tuple[int, ...], Any]] = []
        self._but_for_rows: dict[int, Any] = {}
        self._ended: Any = None

    def arrived(self, members: Iterable[int]) -> None:
        """These gradients have just come, for the first time."""
        found = tuple(members)
        if found:
            self._arrivals.append((found, self._mark()))

    def arrived_but_for_rows(self, member: int) -> None:
        """A gradient has come, but for rows that are to be added."""
        self._but_for_rows[member] = self._mark()

    def ended(self) -> None:
        """The backward is over."""
        self._ended = self._mark()

    def backward_us(self) -> float:
        """From the first gradient to the end."""
        return self._us(self._ended)

    def arrivals(self, all_members: int, without_rows: Collection[int] = ()) -> list[Arrival]:
        """Every member once, in the order of their coming: those that did not come stand at the end.

        without_rows: those whose rows need not be waited for.
        """
        at_us = dict.fromkeys(range(all_members), self.backward_us())
        for members, mark in self._arrivals:
            at_us |= dict.fromkeys(members, self._us(mark))
        for member in set(without_rows) & set(self._but_for_rows):
            at_us[member] = self._us(self._but_for_rows[member])
        together: dict[float, list[int]] = {}
        for member, time_us in sorted(at_us.items(), key=lambda item: item[1]):
            together.setdefault(time_us, []).append(member)
        return [Arrival(tuple(members), time_us) for time_us, members in together.items()]

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


def finish(device: torch.device) -> float:
    """Seconds on the clock, when nothing is under way on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fitted(assumed: Link, num_bytes: int, num_transfers: int, seconds: float) -> Link:
    """`assumed` with the rate that was seen; its latency is kept, as transfers of about one size do not show it."""
    left_us = max(1e6 * seconds - num_transfers * assumed.latency_us, 0.1e6 * seconds)
    return Link(assumed.latency_us, left_us / max(num_bytes, 1))
