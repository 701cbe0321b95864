"""What came of each graph that Dynamo handed over, told to whoever made the call that it was compiled in.

The report (`report`) is for people; what is decided by an outcome, such as a model's door, is decided by these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum


class Outcome(Enum):
    """What was done with a graph."""

    PACKED = "packed"
    REWRITTEN = "rewritten"  # alike for every batch
    DECLINED = "declined"  # compiled as stock would
    EAGER = "eager"  # it could not be compiled
    PUT_OFF = "put off"  # it is not traced yet, as the run cannot afford that
    UNTRACEABLE = "untraceable"  # what stands in it cannot be analysed; told besides what then becomes of it


_FOUND: ContextVar[list[Outcome] | None] = ContextVar("deepytorch_outcomes", default=None)


@contextlib.contextmanager
def outcomes() -> Iterator[list[Outcome]]:
    """The outcomes of the graphs that are compiled inside, in order."""
    found: list[Outcome] = []
    outer = _FOUND.get()
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)
        if outer is not None:
            outer += found


def tell(outcome: Outcome) -> None:
    """One more graph has been dealt with."""
    found = _FOUND.get()
    if found is not None:
        found.append(outcome)
