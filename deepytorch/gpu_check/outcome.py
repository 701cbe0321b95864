"""What a check of a GPU is, and what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

DEADLINE_S = 90.0  # of a check that says nothing of its own, the compiles in it


@dataclass(frozen=True)
class Outcome:
    """What one check found. passed: None where it could not be made; `said` tells why, or a figure."""

    group: str
    name: str
    passed: bool | None
    said: str
    seconds: float


@dataclass(frozen=True)
class Check:
    """One question to the device. run: gives what to say, or raises.

    quick: whether it is asked with `--quick`, too. is_timed: whether nothing else may run meanwhile.
    """

    group: str
    name: str
    run: Callable[[], str]
    quick: bool = True
    is_timed: bool = False
    deadline_s: float = DEADLINE_S

    def made(self) -> Outcome:
        """Make the check; whatever it raises is an outcome."""
        begin = time.monotonic()
        passed: bool | None = True
        try:
            said = self.run()
        except Skipped as reason:
            passed, said = None, str(reason)
        except Failed as reason:
            passed, said = False, str(reason)
        except Exception as error:
            passed, said = False, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
        return Outcome(self.group, self.name, passed, said, round(time.monotonic() - begin, 2))


class Failed(Exception):
    """A check found something wrong; its text says what."""


class Skipped(Exception):
    """A check cannot be made here; its text says why."""
