"""The outcome of each graph that Dynamo handed over, told to the caller in whose call the graph was compiled.

The report (`report`) is for people; decisions such as packing at model entry are made by outcomes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum


class Outcome(Enum):
    """The outcome of one graph."""

    PACKED = "packed"
    REWRITTEN = "rewritten"  # alike for every batch
    DECLINED = "declined"  # compiled as stock would
    EAGER = "eager"  # the graph could not be compiled
    PUT_OFF = "put off"  # the frame is not traced yet, as the run cannot afford that
    UNTRACEABLE = "untraceable"  # the graph cannot be analysed; told in addition to its final outcome


_FOUND: ContextVar[list[Outcome] | None] = ContextVar("deepytorch_outcomes", default=None)


@contextlib.contextmanager
def outcomes() -> Iterator[list[Outcome]]:
    """Collect the outcomes of the graphs that are compiled inside of the block, in order."""
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
    """Add the outcome of one more graph."""
    found = _FOUND.get()
    if found is not None:
        found.append(outcome)
