"""The clock of a training thread: each moment belongs to the innermost scope, so that parts add up to the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from deepytorch.profile.records import COMMUNICATION, REST, Part

BETWEEN = Part(REST, "the script itself")
Mark = tuple[Any, "Scope"]  # a time, and the scope from then on


class Scope:
    """A scope that is entered and left. Its part may be changed until the step is over, where it becomes known late."""

    __slots__ = ("part",)

    def __init__(self, part: Part) -> None:
        self.part = part


_OUTSIDE = Scope(BETWEEN)


class Clock:
    """The clock of one thread.

    on_device: times are those of the current CUDA stream, at which it passes a point, and not those of the host. So
    work of the host counts only where the device waits for it.
    """

    def __init__(self) -> None:
        self.on_device = False
        self._scopes: list[Scope] = []
        self._marks: list[Mark] = []

    def enter(self, scope: Scope) -> None:
        """Enter a scope: time is counted for it from now on."""
        self._scopes.append(scope)
        self._marks.append((self._now(), scope))

    def leave(self, scope: Scope) -> None:
        """Leave a scope, and those inside of it that an error has left open."""
        while scope in self._scopes and self._scopes.pop() is not scope:
            pass
        self._marks.append((self._now(), self._innermost))

    def begin(self) -> None:
        """Begin a step now."""
        self._marks = [(self._now(), self._innermost)]

    def cut(self) -> list[Mark]:
        """End a step now; return its marks, the last of which is its end."""
        marks, self._marks = [*self._marks, (self._now(), self._innermost)], []
        return marks

    @property
    def _innermost(self) -> Scope:
        return self._scopes[-1] if self._scopes else _OUTSIDE

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def parts_of(marks: Sequence[Mark]) -> tuple[dict[Part, float], list[float]]:
    """Return the seconds of each part between marks, and those of each wait for a collective, in order."""
    parts: dict[Part, float] = {}
    waits: list[float] = []
    if marks and not isinstance(marks[-1][0], float):
        marks[-1][0].synchronize()
    for (began, scope), (ended, _) in pairwise(marks):
        seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3
        parts[scope.part] = parts.get(scope.part, 0.0) + seconds
        if scope.part.group == COMMUNICATION:
            waits.append(seconds)
    return parts, waits
