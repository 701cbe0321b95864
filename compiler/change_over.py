"""When the gradients of a DistributedDataParallel module become ours: on all ranks in front of the same step.

[Note: Change-over]
Until a rank has compiled its step beside, the step runs in eager and DDP's own reducer reduces. A rank that is ready
says so in the group's store. Rank 0, when all are, publishes the step from which on gradients are ours. Steps are
counted by what all ranks have in common: forwards of this module that an optimizer step lies in front of. A rank may be
ahead of rank 0 by what lies between two reductions, one step as a rule, so the step is a few ahead: whoever comes to it
has seen the word of rank 0, and nobody waits. If a rank's compile failed, rank 0 publishes that too, and DDP goes on.
From that step on, it does not matter who runs compiled code and who eager: our reducer takes gradients from both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

from deepytorch.errors import GradientError
from deepytorch.log import logger, once
from deepytorch.optimizer_steps import Border

_AHEAD = 4  # steps
_NEVER = "never"


class ChangeOver:
    """Of one module, on one rank of `size`. name: the same on all ranks. store: of the group that reduces. take_over:
    makes its gradients ours.
    """

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, take_over: Callable[[], object]) -> None:
        self._store = dist.PrefixStore(f"deepytorch/change-over/{name}", store)
        self._rank, self._size = rank, size
        self._name, self._take_over = name, take_over
        self._border, self._steps = Border(), 0
        self._said = False
        self._at: int | None = None
        self.is_over = False  # gradients are ours
        self._never = False

    def forward(self) -> None:
        """The module's forward begins; every rank calls this in every forward, from the same one on."""
        if self.is_over or not self._border.passed():
            return
        self._steps += 1
        if self._never or not self._said:
            return
        if self._at is None:
            self._at = self._decide() if self._rank == 0 else self._look()
        if self._at is not None and self._steps >= self._at:
            if self._steps > self._at:
                raise GradientError(
                    f"rank {self._rank} is in step {self._steps} and was to take over in step {self._at}; "
                    "expected every rank to run as many forwards and optimizer steps as the others. Compile with "
                    "options={'wait': True}, or reduce_gradients=False"
                )
            self.is_over = True
            self._take_over()

    def ready(self) -> None:
        """This rank has compiled what is to run."""
        self._say("ready")

    def failed(self) -> None:
        """This rank cannot compile."""
        self._say("failed")

    def _say(self, word: str) -> None:
        if not self._said and not self.is_over:
            self._said = True
            self._store.add(word, 1)

    def _decide(self) -> int | None:
        if self._store.add("failed", 0):
            self._publish(_NEVER)
            return None
        if self._store.add("ready", 0) < self._size:
            return None
        self._publish(str(self._steps + _AHEAD))
        return self._steps + _AHEAD

    def _publish(self, word: str) -> None:
        self._store.set("at", word)
        self._store.get("at")  # it has arrived
        self._heard(word)

    def _look(self) -> int | None:
        if not self._store.check(["at"]):
            return None
        word = self._store.get("at").decode()
        self._heard(word)
        return None if word == _NEVER else int(word)

    def _heard(self, word: str) -> None:
        if word == _NEVER:
            self._never = True
            once(
                logging.WARNING,
                "%s: a rank could not compile its step, so every rank goes on with DistributedDataParallel's reducer",
                self._name,
            )
        else:
            logger.debug("%s: gradients are ours from step %s on", self._name, word)
