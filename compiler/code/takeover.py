"""The takeover of a DistributedDataParallel module's gradients to our reducer, after the same backward on all ranks.

[Note: Takeover]
Until the takeover DDP's own reducer reduces all gradients, those of compiled backwards too. Ranks have one clock in
common without asking each other: the number of the module's backwards that were reduced since its first forward. No
rank completes such a backward before all others have come to it. So a value that a rank writes into the group's store
before a backward is seen by all ranks after it. A rank that is ready counts itself in the store at the end of a
forward. The last rank to do so writes that gradients switch after the backward that follows; after that backward each
rank reads this.

A rank that cannot compile, or that did not see the module's first forward, writes "never". A rank that never comes
here, because Dynamo gave its frame up, is not counted. In both cases DDP goes on on every rank, and nobody waits or
raises. After the takeover, some ranks may run compiled code and others eager: our reducer takes gradients from both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepytorch.compiler.code.agreement import Word
from deepytorch.log import logger, once

_NEVER = "never"


class Takeover:
    """The takeover of one module's gradients, on one rank.

    Args:
        name: The module's name, the same on all ranks.
        store: The store of the group that reduces.
        rank: This rank.
        size: The number of ranks.
        take_over: Hands the gradients to our reducer.
        settle: Waits until all reductions that this rank has begun are done; on GPUs a backward returns before that.
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        take_over: Callable[[], object],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.settings = ""  # of this rank: ranks with different settings do not agree
        self.store, self._store = store, dist.PrefixStore(f"deepytorch/takeover/{name}", store)
        self._word = Word(self._store, "at")
        self._rank, self._size = rank, size
        self._take_over, self._settle = take_over, settle
        self._reduced = 0  # the number of backwards
        self._armed = False  # whether the next backward is to be reduced
        self._looked = -1  # the number of backwards at the last look into the store
        self._willing = self._said = self._never = False
        self._at: int | None = None
        self.is_over = False  # whether our reducer has the gradients

    # ------------------------------------------------------------------ what this rank wants

    def ready(self) -> None:
        """Note that this rank is ready for the takeover."""
        self._willing = True

    def failed(self, why: str = "could not compile its step") -> None:
        """Note that this rank cannot let its gradients be taken over, so that no rank does."""
        if not (self._said or self._never):
            self._never = True
            self._publish(f"{_NEVER}: rank {self._rank} {why}")

    def stop(self) -> None:
        """Leave gradients to DDP on this rank; every other rank does so too, for the same reason."""
        self._never = True

    @property
    def ranks(self) -> tuple[dist.Store, int, int]:
        """Return the store of the group that reduces, this rank and the number of ranks."""
        return self.store, self._rank, self._size

    @property
    def lasts(self) -> bool:
        """Return whether our reducer has the gradients, or may still get them."""
        return not self._never

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module agrees anew

    # ------------------------------------------------------------------ what DDP does

    def forward_begins(self) -> None:
        """Note the begin of a forward whose gradients are wanted; take the gradients over if it is time."""
        if self.is_over or self._never or not self._said or self._looked == self._reduced:
            return
        self._looked = self._reduced
        if self._at is None:
            self._settle()
            self._look()
        if self._at is not None and self._reduced >= self._at:
            self.is_over = True
            self._take_over()

    def forward_ended(self) -> None:
        """Note the end of a forward whose backward DDP is to reduce; count this rank if it is ready."""
        self._armed = True
        if self._willing and not (self._said or self._never):
            self._settle()
            self._said = True
            if self._count() == self._size:
                self._publish(str(self._reduced + 1))

    def accumulated(self) -> None:
        """Note that a backward has come to a parameter."""
        self._reduced += self._armed
        self._armed = False

    # ------------------------------------------------------------------ the store

    def _count(self) -> int:
        try:
            return self._store.add(f"ready {self.settings}", 1)
        except RuntimeError:  # the store has gone: the run itself has to deal with that
            return 0

    def _publish(self, word: str) -> None:
        self._never |= not self._word.say(word)
        self._heard(word)

    def _look(self) -> None:
        word = self._word.heard()
        if word is not None:
            self._heard(word)

    def _heard(self, word: str) -> None:
        if word.startswith(_NEVER):
            self._never = True
            reason = word.removeprefix(f"{_NEVER}: ")
            once(logging.WARNING, "%s: %s, so gradients stay with DistributedDataParallel", self.name, reason)
        else:
            self._at = int(word)
            logger.debug("%s: gradients are ours behind %s backwards", self.name, word)
