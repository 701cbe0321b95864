"""What a script does with a region's outputs, and what the region therefore has to give.

The first step of a region runs in eager and its outputs are watched: what is done with them there decides how the
second one begins. Later uses are seen as well. A region never goes back: what a script did once, it may do again.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from deepytorch.log import once

# Calls that are watched at most while none of them has had its backward: a step may call a model several times.
MAX_WATCHED = 8

FRAMEWORKS = (
    "torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "lightning", "lightning_fabric",
    "pytorch_lightning", "deepytorch",
)  # fmt: skip


class Level(IntEnum):
    """What the uses of a region's outputs take: tokens alone, padded values, or the graph that eager makes of them."""

    PACKED = 0
    PADDED = 1
    EAGER = 2


class Usage:
    """The uses of one region's outputs.

    outputs: for a report, of each output the functions that were applied to it, and what had to be padded for whom.
    """

    def __init__(self, region: str) -> None:
        self.region = region
        self.level = Level.PACKED
        self.reason = ""
        self.outputs: dict[str, list[str]] = {}

    def packed(self, output: str, function: Any) -> None:
        """An output was used as its tokens."""
        self._note(output, name_of(function))

    def padded(self, output: str, function: Any) -> None:
        """An output was used in a way that takes its pads."""
        self._raise(Level.PADDED, output, name_of(function), "padded positions")

    def graph(self, output: str, function: Any) -> None:
        """An output was used in a way that takes its place between the weights and the loss."""
        self._raise(Level.EAGER, output, name_of(function), "the gradient")

    def twice(self, asked: str) -> None:
        """A backward of the region was asked for what compiled code cannot give."""
        if self.level < Level.EAGER:
            self.level, self.reason = Level.EAGER, f"a backward with {asked}"
            once(logging.INFO, "%s: %s, so that its steps run in eager from now on", self.region, self.reason)

    def differs(self) -> None:
        """A packed step of the region was compared with eager, and differed."""
        self.level, self.reason = max(self.level, Level.PADDED), "packed and eager steps differed when compared"

    def _raise(self, level: Level, output: str, function: str, looks_at: str) -> None:
        where = whose_line()
        self._note(output, f"{function} ({where}) looks at {looks_at}")
        if level > self.level:
            self.level = level
            self.reason = f"{function} at {where} looks at {looks_at} of {output!r}"
            once(
                logging.INFO,
                "%s: %s, so that its steps run %s from now on",
                self.region,
                self.reason,
                level.name.lower() if level is Level.PADDED else "in eager",
            )

    def _note(self, output: str, use: str) -> None:
        known = self.outputs.setdefault(output, [])
        if use not in known and len(known) < 20:
            known.append(use)


class WatchedCalls:
    """The calls of a region whose outputs are watched: until one of them has had its backward."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._count, self._backward = 0, False

    @property
    def goes_on(self) -> bool:
        """Whether the next call is watched as well."""
        return self._count == 0 or (self._count < MAX_WATCHED and not self._backward)

    def took(self, outputs: Sequence[Any]) -> None:
        """These are the outputs of one more."""
        self._count += 1
        trained = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        self._backward |= not trained
        for each in trained:
            each.register_hook(self._saw_backward)

    def _saw_backward(self, gradient: torch.Tensor) -> None:
        self._backward = True
        if torch.is_grad_enabled():  # with a graph of its own
            self._usage.twice("create_graph=True")


def name_of(function: Any) -> str:
    """How a user would call a torch function."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and owner is not None:
        return getattr(owner, "__name__", "attribute")
    return getattr(function, "__name__", str(function)).strip("_")


def whose_line() -> str:
    """The file and line of the user's that is running: the innermost one that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "deepytorch") and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def is_users(hook: Any) -> bool:
    """Whether no framework wrote a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in FRAMEWORKS
