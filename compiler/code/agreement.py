"""Agreement of the ranks of one group, by words in the group's store.

Nobody waits for a word and nobody raises: who does not find one goes on as before, and a store that is gone says none.
Keys hold the name of a data-parallel module, which is the same on all ranks, in the store of the group that reduces.
"""

from __future__ import annotations

from typing import Any

_PATIENCE = 20  # calls in which a rank could afford its trace, before it waits for rank 0's word no longer


class Word:
    """One word that ranks read from a store; whoever writes it, writes it once."""

    def __init__(self, store: Any, key: str) -> None:
        self.store, self._key = store, key

    def say(self, text: str) -> bool:
        """Write the word; return whether it has arrived."""
        try:
            self.store.set(self._key, text)
            self.store.get(self._key)
        except RuntimeError:  # the store has gone: what that means for the run is not ours to say
            return False
        return True

    def heard(self) -> str | None:
        """Return the word, or None if nobody has written it so far."""
        try:
            return str(self.store.get(self._key).decode()) if self.store.check([self._key]) else None
        except RuntimeError:  # likewise
            return None


class SameStep:
    """The call in which all ranks of a DistributedDataParallel module trace it.

    Rank 0 names it, one call ahead. Whoever comes to that call has been through the backward before it, which rank 0
    was in as well, and so finds the word. With gradient accumulation a rank may be further ahead, and traces when it
    finds the word.
    """

    def __init__(self, name: str, store: Any, rank: int) -> None:
        self._word, self._rank, self._at, self._could = Word(store, f"deepytorch/first-trace/{name}"), rank, 0, 0

    def has_come(self, call: int, affordable: bool) -> bool:
        """Return whether a call, counted from 1, is the named one or lies behind it.

        affordable: this rank could afford to trace in the call.
        """
        self._could += affordable
        if not self._at and self._rank == 0 and affordable:
            self._at = call + 1
            self._word.say(str(self._at))
        elif not self._at and self._rank != 0:
            word = self._word.heard()
            self._at = int(word) if word is not None else call if self._could > _PATIENCE else 0
        return 0 < self._at <= call
