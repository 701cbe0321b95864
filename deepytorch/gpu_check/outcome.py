"""A check of a GPU, and its outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

DEADLINE_S = 90.0  # the default deadline of a check, with its compiles


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check. passed: None if it could not be made. said: the reason, or a figure."""

    group: str
    name: str
    passed: bool | None
    said: str
    seconds: float


@dataclass(frozen=True)
class Check:
    """One check of the device. run: returns the text of the outcome, or raises.

    quick: whether the check is made with `--quick`, too. is_timed: whether nothing else may run at the same time.
    """

    group: str
    name: str
    run: Callable[[], str]
    quick: bool = True
    is_timed: bool = False
    deadline_s: float = DEADLINE_S

    def made(self) -> Outcome:
        """Make the check; an error that it raises is an outcome."""
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
    """An error for a check that found something wrong; its text says what."""


class Skipped(Exception):
    """An exception for a check that cannot be made here; its text says why."""
