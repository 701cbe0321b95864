"""The budget of pauses: the seconds that deepytorch has cost and saved a run. Only an affordable pause begins.

[Note: What a pause may cost]
Four things stop training: Dynamo's traces, the proof, compiling in the training process, and loading code that another
process has compiled. No run may be more than 6 % slower than eager at any point. So each such pause is charged here,
and has to be affordable before it begins: the run is old enough for the pause to be `SHARE` of it, or packed steps have
saved as much. The rest of the 6 % is for costs that are not charged: the import, the calls of armed modules, and the
caches and cores that the compile process takes from training. `DEEPYTORCH_COMPILE=wait` compiles from the first step
on, as `torch.compile` does, and asks no budget.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from deepytorch.compiler.report import STARTS
from deepytorch.process_facts import seconds_since_start

SHARE = 0.05  # of the seconds that eager would have taken so far


class Budget:
    """The seconds that this process lost and saved by deepytorch, against those that eager would have taken.

    balance: seconds saved, less seconds lost. paused: seconds for which training has stood still.
    """

    def __init__(self) -> None:
        self.balance = 0.0
        self.paused = 0.0
        self._is_pausing = False

    def account(self, saved: float) -> None:
        """Add seconds that were saved; lost ones are negative."""
        before, self.balance = self.balance, self.balance + saved
        if before <= 0.0 < self.balance:
            STARTS.break_even = seconds_since_start()

    def affords(self, seconds: float) -> bool:
        """Return whether a pause leaves the run within `SHARE` of eager's time."""
        return seconds <= self.longest_pause()

    def longest_pause(self) -> float:
        """Return the number of seconds for which training may stand still from now on."""
        return self.balance + SHARE * (seconds_since_start() + self.balance)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Charge the time of the block, for which training waits. A pause inside of another one is charged once."""
        if self._is_pausing:
            yield
            return
        started, self._is_pausing = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_pausing = False
            seconds = time.perf_counter() - started
            self.paused += seconds
            self.account(-seconds)


BUDGET = Budget()
