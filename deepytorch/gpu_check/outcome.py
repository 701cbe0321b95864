"""A check of a GPU, and its outcome."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from deepytorch.bench.results import Record

DEADLINE_S = 90.0  # the default deadline of a check, with its compiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Record):
    """The outcome of one check, as the result file has it.

    Attributes:
        group, name: The check.
        passed: None if it could not be made.
        said: What was found, in words: the reason where it did not pass.
        seconds: For which it ran.
        figures: Numbers by name, which ends with the unit, as in `bench.results`.
        call: The smallest command that shows it.
        sources: A digest of the sources that the check runs; empty: not known, so it is made again.
        versions: Of what else decides the outcome, in words.
        date: The day.
    """

    what = "outcome"

    group: str
    name: str
    passed: bool | None
    said: str
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    call: str = ""
    sources: str = ""
    versions: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a check: in words, and figures as an `Outcome` has them."""

    said: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check of the device.

    Attributes:
        group: The checks of a group follow each other in one process. "subject: part" is a part of a subject.
        name: Its name in the group.
        run: Returns what was found, or raises.
        quick: Whether the check is made with `--quick`, too.
        is_first: Whether it is made before all others, and alone, since it uses all cores.
        is_timed: Whether nothing else may run at the same time. Those of a group stand behind its others.
        deadline_s: After which its process is ended.
        expected_s: An estimate of its seconds; for a plan where it was not yet made.
        needs: Packages without which it cannot be made, by the names that Python imports.
        module: Whose sources, with all that they import, decide whether it has to be made again.
    """

    group: str
    name: str
    run: Callable[[], str | Found]
    quick: bool = True
    is_first: bool = False
    is_timed: bool = False
    deadline_s: float = DEADLINE_S
    expected_s: float = 5.0
    needs: tuple[str, ...] = ()
    module: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return group and name."""
        return self.group, self.name

    @property
    def call(self) -> str:
        """Return the command that makes this check alone."""
        return shlex.join(["deepytorch", "gpu-check", "--only", f"{self.group}/{self.name}"])

    def is_named(self, name: str) -> bool:
        """Return whether `name` is that of this check's subject, group, or of itself: "subject: part/check"."""
        return name in (self.group.partition(":")[0], self.group, f"{self.group}/{self.name}")

    def outcome(self, passed: bool | None, said: str, seconds: float = 0.0, call: str = "") -> Outcome:
        """Return an outcome of this check."""
        return Outcome(
            group=self.group,
            name=self.name,
            passed=passed,
            said=said,
            seconds=round(seconds, 2),
            call=call or self.call,
        )

    def made(self) -> Outcome:
        """Make the check; an error that it raises is an outcome."""
        begin = time.monotonic()
        passed: bool | None = True
        call, figures = "", dict[str, float]()
        try:
            found = self.run()
            said, figures = (found, figures) if isinstance(found, str) else (found.said, found.figures)
        except Skipped as reason:
            passed, said = None, str(reason)
        except Failed as reason:
            passed, said, call = False, str(reason), reason.call
        except Exception as error:
            passed, said = False, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
        made = self.outcome(passed, said, time.monotonic() - begin, call)
        made.figures.update(figures)
        return made


class Failed(Exception):
    """An error for a check that found something wrong; its text says what. call: a command that shows less besides."""

    def __init__(self, text: str, call: str = "") -> None:
        super().__init__(text)
        self.call = call


class Skipped(Exception):
    """An exception for a check that cannot be made here; its text says why."""
