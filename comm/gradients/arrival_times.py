"""Profile of one backward: when its gradients arrived, and how long their buckets took one after the other."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

import torch

from deepytorch.comm.gradients.buckets import Arrival
from deepytorch.comm.topology.cost import Link


class ArrivalTimes:
    """The times of one backward, from its first gradient on: on a GPU by its stream, on a CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        """Start now. device: that of the gradients."""
        self._device = device
        self._began = self._mark()
        self._arrivals: list[tuple[tuple[int, ...], Any]] = []
        self._but_for_rows: dict[int, Any] = {}
        self._ended: Any = None

    def arrived(self, members: Iterable[int]) -> None:
        """Record that these gradients have just arrived, for the first time."""
        found = tuple(members)
        if found:
            self._arrivals.append((found, self._mark()))

    def arrived_but_for_rows(self, member: int) -> None:
        """Record that a gradient has arrived, except for rows that are still to be added."""
        self._but_for_rows[member] = self._mark()

    def ended(self) -> None:
        """Record the end of the backward."""
        self._ended = self._mark()

    def backward_us(self) -> float:
        """Return the time from the first gradient to the end."""
        return self._us(self._ended)

    def arrivals(self, all_members: int, without_rows: Collection[int] = ()) -> list[Arrival]:
        """Return every member once, in the order of arrival; members that did not arrive come last.

        without_rows: members whose rows need not be waited for.
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
    """Wait until the device is idle; return the seconds on the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fitted(assumed: Link, num_bytes: int, num_transfers: int, seconds: float) -> Link:
    """Return `assumed` with the measured rate.

    The latency is kept, as transfers of about one size do not show it.
    """
    left_us = max(1e6 * seconds - num_transfers * assumed.latency_us, 0.1e6 * seconds)
    return Link(assumed.latency_us, left_us / max(num_bytes, 1))
