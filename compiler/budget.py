"""Seconds that deepytorch has cost a run and saved it: a pause begins only if the run can afford it.

[Note: What a pause may cost]
Dynamo's traces, the proof, compiling in the training process and loading what another process has compiled all stop
training. No run is to be more than 6 % slower than eager at any point, so each such pause is charged here, and has to
be affordable before it begins: the run is old enough for the pause to be `SHARE` of it, or packed steps have saved as
much. The rest of the 6 % is for what is not charged: the import, the calls of armed modules, and what the compile
process takes of the caches and cores that training uses. Whoever compiles from the first step on, as `torch.compile`
does, sets `DEEPYTORCH_COMPILE=wait`, and nothing is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from deepytorch.compiler.report import STARTS
from deepytorch.process_age import seconds_since_start

SHARE = 0.05  # of the seconds that eager would have taken so far


class Budget:
    """Seconds that this process lost and saved by us, against those that eager would have taken.

    balance: seconds saved, less seconds lost. paused: seconds for which training has stood still.
    """

    def __init__(self) -> None:
        self.balance = 0.0
        self.paused = 0.0
        self._is_pausing = False

    def account(self, saved: float) -> None:
        """Add seconds that were saved, or take off those that were lost."""
        before, self.balance = self.balance, self.balance + saved
        if before <= 0.0 < self.balance:
            STARTS.break_even = seconds_since_start()

    def affords(self, seconds: float) -> bool:
        """Return whether a pause leaves the run within `SHARE` of eager's time."""
        return seconds <= self.longest_pause()

    def longest_pause(self) -> float:
        """Return for how many seconds training may stand still from now on."""
        return self.balance + SHARE * (seconds_since_start() + self.balance)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Charge what runs inside, as training waits for it. A pause inside of another one is charged once."""
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
