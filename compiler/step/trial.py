"""The comparison of two ways to run a model, by the time of the training steps themselves.

No step runs twice: each one is run in one of the two ways, and counts for training like any other.
"""

from __future__ import annotations

import statistics

_BLOCK = 3  # steps in a row; the first, which still feels the block before, is not counted
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 6
_CLEAR = 0.04  # apart by this in each round: no further rounds are needed


class Trial:
    """A trial of a challenger against the way in use, in blocks of steps that take turns: AB BA AB ...

    rounds: how many there are; None: as few as a clear difference needs. Ranks that train together name a number, and
    note a time for each step, so that their turns stay the same. is_over: whether all rounds are done. gain: then the
    time of the way in use over that of the challenger. is_clear: whether it came out the same way in each round.
    """

    def __init__(self, rounds: int | None = None) -> None:
        self.is_over, self.gain, self.is_clear = False, 1.0, False
        self._least, self._most = (_LEAST_ROUNDS, _MOST_ROUNDS) if rounds is None else (rounds, rounds)
        self._ratios: list[float] = []  # of the rounds that are done
        self._means: list[float] = []  # seconds of a step, of this round's blocks that are done
        self._block: list[float] = []
        self._took: dict[bool, list[float]] = {False: [], True: []}  # seconds of all steps; True: of the challenger's
        self._is_first = True  # the next step is the first one of its block

    @property
    def challenges(self) -> bool:
        """Return whether the next step is one of the challenger's."""
        begins_round = not self._means
        challenger_begins = len(self._ratios) % 2 == 1
        return begins_round == challenger_begins

    @property
    def lost(self) -> float:
        """Return the seconds by which steps of the slower way took longer than as many of the faster one."""
        used, challenger = self._took.values()
        if not (used and challenger):
            return 0.0
        slower, faster = sorted((used, challenger), key=statistics.mean, reverse=True)
        return len(slower) * (statistics.mean(slower) - statistics.mean(faster))

    def note(self, seconds: float | None, took: float = 0.0) -> None:
        """Note the time of the step that `challenges` was asked for.

        seconds: for its share of a batch, say; None if something else took time in it. took: of the whole step.
        """
        self._took[self.challenges].append(took)
        if not self._is_first and seconds is not None:
            self._block.append(seconds)
        self._is_first = False
        if self.is_over or len(self._block) < _BLOCK - 1:
            return
        self._means.append(statistics.mean(self._block))
        self._block, self._is_first = [], True
        if len(self._means) == 2:
            used, challenger = self._means if len(self._ratios) % 2 == 0 else self._means[::-1]
            self._ratios.append(used / challenger)
            self._means = []
            self._judge()

    def _judge(self) -> None:
        rounds = len(self._ratios)
        self.is_clear = all(each > 1.0 + _CLEAR for each in self._ratios) or all(
            each < 1.0 - _CLEAR for each in self._ratios
        )
        if rounds >= self._most or (rounds >= self._least and self.is_clear):
            self.is_over, self.gain = True, statistics.median(self._ratios)
