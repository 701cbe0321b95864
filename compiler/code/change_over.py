"""When the gradients of a DistributedDataParallel module become ours: on all ranks in front of the same backward.

[Note: Change-over]
Until then DDP's own reducer reduces, also what compiled backwards hand over. Ranks have one clock in common without
asking each other: how many backwards of the module they have reduced since its first forward. Nobody is through such a
backward before all others have come to it. So what a rank writes into the group's store in front of one is seen by all
behind it. A rank that is willing counts itself there at the end of a forward. The one that is the last of all says that
gradients are ours behind the backward that follows, and there each rank finds its word.

A rank that cannot compile, or that did not see the module's first forward, says "never". One that never comes here, as
Dynamo gave its frame up, is not counted. In both cases DDP goes on on every rank, and nobody waits or raises.
From the change-over on, it does not matter who runs compiled code and who eager: our reducer takes gradients from both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepytorch.compiler.code.agreement import Word
from deepytorch.log import logger, once

_NEVER = "never"


class ChangeOver:
    """Of one module, on one rank of `size`. name: the same on all ranks. store: of the group that reduces.

    take_over: makes its gradients ours. settle: returns when all that this rank had reduced so far is reduced, where a
    backward returns before (on GPUs).
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
        self.settings = ""  # of this rank: ranks that were told different things do not agree
        self.store, self._store = store, dist.PrefixStore(f"deepytorch/change-over/{name}", store)
        self._word = Word(self._store, "at")
        self._rank, self._size = rank, size
        self._take_over, self._settle = take_over, settle
        self._reduced = 0  # backwards
        self._armed = False  # whether the backward that comes is to be reduced
        self._looked = -1  # behind how many
        self._willing = self._said = self._never = False
        self._at: int | None = None
        self.is_over = False  # gradients are ours

    # ------------------------------------------------------------------ what this rank wants

    def ready(self) -> None:
        """This rank is to go on with gradients that are ours."""
        self._willing = True

    def failed(self, why: str = "could not compile its step") -> None:
        """This rank cannot: then no rank does."""
        if not (self._said or self._never):
            self._never = True
            self._publish(f"{_NEVER}: rank {self._rank} {why}")

    def stop(self) -> None:
        """Gradients stay with DDP on this rank, and for the same reason on all others."""
        self._never = True

    @property
    def lasts(self) -> bool:
        """Whether gradients are ours, or may be."""
        return not self._never

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module agrees anew

    # ------------------------------------------------------------------ what DDP does

    def forward(self) -> None:
        """A forward begins whose gradients are wanted."""
        if self.is_over or self._never or not self._said or self._looked == self._reduced:
            return
        self._looked = self._reduced
        if self._at is None:
            self._settle()
            self._look()
        if self._at is not None and self._reduced >= self._at:
            self.is_over = True
            self._take_over()

    def armed(self) -> None:
        """A forward has ended whose backward DDP is to reduce."""
        self._armed = True
        if self._willing and not (self._said or self._never):
            self._settle()
            self._said = True
            if self._count() == self._size:
                self._publish(str(self._reduced + 1))

    def accumulated(self) -> None:
        """A backward has come to a parameter."""
        self._reduced += self._armed
        self._armed = False

    # ------------------------------------------------------------------ the store

    def _count(self) -> int:
        try:
            return self._store.add(f"ready {self.settings}", 1)
        except RuntimeError:  # the store has gone: what that means for the run is not ours to say
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
