"""The time at which a form of a region is tried, and the outcome: of one process, or the same on all ranks.

[Note: Trials among ranks]
Ranks that train together wait for each other in every backward. So a step takes as long as the slowest rank's, and a
trial measures a form only if all ranks run it in the same steps. Rank 0 names the form and the step, two steps ahead,
as soon as all ranks have the form; nobody is further ahead than one step, so all ranks find the word in time. After the
trial each rank writes what it has measured, rank 0 writes the least gain, and all ranks act on it in the same step.

Words lie in the store of the group that reduces gradients. Nobody waits for a word. Every form leaves gradients to the
same reducer, so a rank that misses a word runs another form, and its numbers stay right.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from deepytorch.compiler.code.agreement import Word

_PATIENCE = 200  # steps: for which a region waits for another one's trial, and for the first word of rank 0
_MOST_TRIALS = 12  # of a process: a model that is compiled in many pieces would be on trial for thousands of steps
_AHEAD = 2  # steps between a word and what it is about
_TRY, _USE = "try", "use"  # of rank 0's words


class Turn(NamedTuple):
    """A form's turn. is_known: it is the fastest, as an earlier run has found, and needs no trial."""

    form: str
    is_known: bool = False


class OneProcess:
    """The turns of a region in a process that trains alone. One region of a process is on trial at a time.

    has_given_up: whether no trial will begin any more.
    """

    def __init__(self) -> None:
        self.has_given_up = False
        self._waited = 0

    def step_begins(self) -> None:
        """Note a step of the script, which begins."""

    def next_form(self, ready: Sequence[str], known: str | None) -> Turn | None:
        """Return the form, of those that are ready, whose turn begins with this step; None if none does.

        known: the form that an earlier run has found to be the fastest, if it is known.
        """
        turn = Turn(ready[0], ready[0] == known)
        return self._begin(turn) if self._may_try(turn) and self._take_slot() else None

    @property
    def is_on(self) -> bool:
        """Return whether the trial that has begun may go on: no other region has taken over."""
        return any(each() is self for each in _ON_TRIAL)

    def agreed(self, gain: float) -> float | None:
        """Return the gain of a trial that is over, as all ranks see it; None as long as they do not know it."""
        return gain

    def end(self) -> None:
        """End the trial."""
        if self.is_on:
            _ON_TRIAL.clear()

    def _may_try(self, turn: Turn) -> bool:
        """Return whether a form may have its turn; give up if this process has had enough trials."""
        self.has_given_up = not turn.is_known and _trials_begun >= _MOST_TRIALS
        return not self.has_given_up

    def _begin(self, turn: Turn) -> Turn:
        """Note that a turn begins."""
        global _trials_begun
        _trials_begun += not turn.is_known
        return turn

    def _take_slot(self) -> bool:
        """Take the place of the trial, if it is free or has been taken for too long. Return whether it is ours."""
        self._waited += 1
        if self._waited <= _PATIENCE and any(each() is not None and each() is not self for each in _ON_TRIAL):
            return False
        self._waited, _ON_TRIAL[:] = 0, [weakref.ref(self)]
        return True


class AmongRanks(OneProcess):
    """The turns of a region on one rank of several: see [Note: Trials among ranks].

    Args:
        store: The store of the group that reduces.
        rank: This rank.
        size: The number of ranks.
        region: The region's name, the same on all ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, region: str) -> None:
        super().__init__()
        self._store, self._rank, self._size, self._prefix = store, rank, size, f"deepytorch/trial/{region}"
        self._step = self._trials = self._silent = 0
        self._counted: set[str] = set()  # forms for which this rank counts as ready
        self._named: tuple[Turn, int] | None = None  # the next turn, and the step in which it begins
        self._ended = 0  # the step in which the trial that is over was over

    def step_begins(self) -> None:
        self._step += 1

    def next_form(self, ready: Sequence[str], known: str | None) -> Turn | None:
        for form in ready:
            if form not in self._counted:
                self._counted.add(form)
                self._count(form, 1)
        if self._named is None:
            self._named = self._name(ready, known) if self._rank == 0 else self._listen()
        if self._named is None:
            self._silent += not any(each() is not None and each() is not self for each in _ON_TRIAL)
            self.has_given_up |= self._silent > _PATIENCE
            return None
        turn, step = self._named
        if self._step < step:
            return None
        self._named, self._silent, self._ended = None, 0, 0
        self._trials += 1
        _ON_TRIAL[:] = [weakref.ref(self)]
        return self._begin(turn) if turn.form in ready else None

    def agreed(self, gain: float) -> float | None:
        if not self._ended:
            self._ended = self._step
            self._word(f"gain/{self._rank}").say(repr(gain))
        passed = self._step - self._ended
        if self._rank == 0 and passed == _AHEAD:
            self._word("verdict").say(f"{self._least_gain()!r} {self._step + _AHEAD}")
        if passed < 2 * _AHEAD:
            return None
        verdict = self._heard("verdict")
        return float(verdict[0]) if verdict is not None else 0.0

    def _name(self, ready: Sequence[str], known: str | None) -> tuple[Turn, int] | None:
        """Name the next form and its step, on rank 0; None if no form is ready on all ranks."""
        for form in ready if known is None else [form for form in ready if form == known]:
            turn = Turn(form, form == known)
            if self._may_try(turn) and self._count(form, 0) >= self._size and self._take_slot():
                step = self._step + _AHEAD
                self._word("begins").say(f"{_USE if turn.is_known else _TRY} {form} {step}")
                return turn, step
        return None

    def _listen(self) -> tuple[Turn, int] | None:
        """Return the turn that rank 0 has named, and its step; None if it has named none."""
        heard = self._heard("begins")
        if heard is None:
            return None
        what, _, form = heard[0].partition(" ")
        return Turn(form, what == _USE), heard[1]

    def _least_gain(self) -> float:
        """Return the gain on the rank that gains least; 0 if a rank has not said its own."""
        words = [self._word(f"gain/{rank}").heard() for rank in range(self._size)]
        return min(0.0 if word is None else float(word) for word in words)

    def _count(self, form: str, more: int) -> int:
        try:
            return int(self._store.add(f"{self._prefix}/ready/{form}", more))
        except RuntimeError:  # the store has gone: what that means for the run is not ours to say
            return 0

    def _heard(self, what: str) -> tuple[str, int] | None:
        word = self._word(what).heard()
        if word is None:
            return None
        text, _, step = word.rpartition(" ")
        return text, int(step)

    def _word(self, what: str) -> Word:
        return Word(self._store, f"{self._prefix}/{self._trials}/{what}")


_ON_TRIAL: list[weakref.ref[OneProcess]] = []  # at most one
_trials_begun = 0  # in this process
