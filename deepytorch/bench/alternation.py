"""Scripts that run steps in turns: each waits before a step until the others have done theirs.

The load of a machine changes from minute to minute. Scripts that run one after the other meet different conditions;
steps in alternation meet the same. A rank reports over one pipe that it is ready for a step or has done it, and gets
its turn over another pipe; it sleeps while it waits. If the pipes are closed, the rank continues without turns.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

READY, DONE, GO = b"r", b"d", b"g"


class Turn:
    """The end of a rank: `take()` before a step, `hand_on()` after it. listen, speak: file descriptors of the pipes."""

    def __init__(self, listen: int, speak: int) -> None:
        self._listen, self._speak = listen, speak

    def take(self) -> None:
        """Wait until the step may be run."""
        if self._say(READY):
            os.read(self._listen, 1)

    def hand_on(self) -> None:
        """Report that the step is done."""
        self._say(DONE)

    def close(self) -> None:
        """Take no further turns."""
        os.close(self._listen)
        os.close(self._speak)

    def _say(self, word: bytes) -> bool:
        try:
            os.write(self._speak, word)
        except BrokenPipeError:  # the giver of turns has ended
            return False
        return True


class TurnGiver:
    """The other end of the pipes, for all ranks of one script."""

    def __init__(self, ranks: int) -> None:
        self._hear: list[int] = []
        self._tell: list[int] = []
        self.handed_over: list[tuple[int, int]] = []  # by rank: the arguments of `Turn`; its process inherits the pipes
        for _ in range(ranks):
            hear, speak = os.pipe()
            listen, tell = os.pipe()
            self._hear.append(hear)
            self._tell.append(tell)
            self.handed_over.append((listen, speak))

    def started(self) -> None:
        """Close this process's copies of the ranks' pipe ends, once every process has inherited its own.

        The end of a process is noticed only then.
        """
        for ends in self.handed_over:
            for end in ends:
                os.close(end)
        self.handed_over = []

    def give(self, deadline: float) -> bool:
        """Let all ranks run a step; return False if they take no more turns, or if one of them has ended.

        deadline: on `time.monotonic()`; raises `TimeoutError` when the step is not done by then.
        """
        if not self._all_say(READY, deadline):
            self.close()
            return False
        for tell in self._tell:
            try:
                os.write(tell, GO)
            except BrokenPipeError:
                self.close()
                return False
        if not self._all_say(DONE, deadline):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Give no further turns: ranks that wait for one continue."""
        for end in (*self._hear, *self._tell):
            os.close(end)
        self._hear, self._tell = [], []

    def _all_say(self, word: bytes, deadline: float) -> bool:
        return bool(self._hear) and all(self._says(hear, word, deadline) for hear in self._hear)

    @staticmethod
    def _says(hear: int, word: bytes, deadline: float) -> bool:
        readable, _, _ = select.select([hear], [], [], max(deadline - time.monotonic(), 0.0))
        if not readable:
            raise TimeoutError
        return os.read(hear, 1) == word


def alternate(scripts: Sequence[Callable[[], bool]]) -> None:
    """Let each script in turn run one step, until none has one left.

    A script returns False when it has none.
    """
    left = list(scripts)
    while left:
        left = [step for step in left if step()]
