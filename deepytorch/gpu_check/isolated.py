"""Groups of checks, each in a process of its own: a crash, a hang or a broken device ends only that process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from deepytorch.bench.processes import Program, ending, last_lines
from deepytorch.bench.results import decoded
from deepytorch.gpu_check.outcome import Check, Outcome

WORKER = (sys.executable, "-m", "deepytorch.gpu_check.worker")
TOGETHER = max(
    2, min(8, (os.cpu_count() or 2) // 2)
)  # processes that are busy: most of a check is compiling on the host

_START_S = 90.0  # for a process to load torch and to begin
_POLL_S = 0.05
_LOG_LINES = 6


def run_groups(
    checks: Sequence[Check],
    device: str,
    seconds: float,
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> Iterator[Outcome]:
    """Make all checks, and yield the outcomes as soon as they are known.

    Checks of one group follow each other in one process; after a check that crashed, hung or broke the device a new
    process makes the rest. Groups begin in the order in which they are given, as `next_group` lets them. When nothing
    is left but timed checks, one group after the other makes its own. Checks that are not over within `seconds` are
    reported as not made. No process is left, however this ends.
    """
    names = list(dict.fromkeys(check.group for check in checks))
    waiting = [_Group(name, [each for each in checks if each.group == name], device, worker) for name in names]
    running = list[_Group]()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="deepytorch-gpu-check-") as folder, contextlib.ExitStack() as stack:
        while waiting or running:
            if time.monotonic() > end:
                for group in (*running, *waiting):
                    yield from group.left(f"not over within {seconds:.0f} s")
                break
            while (begun := next_group(waiting, [each for each in running if not each.waits])) is not None:
                waiting.remove(begun)
                running.append(begun)
                stack.callback(begun.close)
                begun.start(Path(folder))
            for group in list(running):
                yield from group.listen(notify)
                if group.is_over:
                    running.remove(group)
            if running and not waiting and all(group.waits for group in running):
                running[0].go_on()
            time.sleep(_POLL_S)


class Place(Protocol):
    """The facts that decide when a group may begin: whether one of its checks is to be first, or is timed.

    prepares_s: for how long it is expected to prepare what will be timed.
    """

    is_first: bool
    is_timed: bool
    prepares_s: float


Group = TypeVar("Group", bound=Place)


def next_group(waiting: Sequence[Group], busy: Sequence[Group], together: int = TOGETHER) -> Group | None:
    """Return the group to begin now, beside busy ones; None if none may.

    Those that are to be first run alone. Of the others, what is right or wrong comes first; where many run together,
    some of them prepare meanwhile what will be timed, the longest first.
    """
    first = [group for group in waiting if group.is_first]
    if first:
        return None if busy else first[0]
    if not waiting or len(busy) >= together or any(group.is_first for group in busy):
        return None
    timed = sorted((group for group in waiting if group.is_timed), key=lambda group: -group.prepares_s)
    others = [group for group in waiting if not group.is_timed]
    num_others = sum(not group.is_timed for group in busy)
    if others and (not timed or num_others < together - max(0, together // 2 - 1)):
        return others[0]
    return timed[0] if timed else None


class _Group:
    """The checks of one group, and the process that makes them."""

    def __init__(self, name: str, checks: Sequence[Check], device: str, worker: Sequence[str]) -> None:
        self._name, self._device, self._worker = name, device, worker
        self._checks = sorted(checks, key=lambda check: check.is_timed)
        self.is_first = any(check.is_first for check in checks)
        self.is_timed = any(check.is_timed for check in checks)
        self.prepares_s = sum(check.expected_s for check in checks if not check.is_timed)
        self.waits = False  # for its turn to make timed checks
        self._program: Program | None = None
        self._num_started = 0
        self._has_begun = False  # whether this process has begun any check
        self._begun: str | None = None  # the check that is being made
        self._heard = 0.0
        self._folder = Path()

    @property
    def is_over(self) -> bool:
        """Return whether no check is left to be made."""
        return not self._checks

    def start(self, folder: Path) -> None:
        """Start a process for the checks that are left; its files are in `folder`."""
        self.close()
        self._folder, self._begun, self._has_begun, self._heard = folder, None, False, time.monotonic()
        self.waits = False
        self._num_started += 1
        stem = "".join(each if each.isalnum() else "-" for each in f"{self._name}-{self._num_started}")
        self._records = folder / f"{stem}.jsonl"
        self._records.touch()
        self._read = 0
        names = json.dumps([check.name for check in self._checks])
        command = [*self._worker, str(self._records), self._name, names, self._device]
        self._program = Program(command, folder / f"{stem}.log", stdin=subprocess.PIPE)  # closes when this process ends

    def go_on(self) -> None:
        """Let the process make its timed checks."""
        assert self._program is not None
        assert self._program.process.stdin is not None
        self.waits, self._heard = False, time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self._program.process.stdin.write(b"\n")
            self._program.process.stdin.flush()

    def listen(self, notify: Callable[[str], None]) -> list[Outcome]:
        """Return new outcomes since the last call. Starts the next process if this one is gone and checks are left."""
        assert self._program is not None
        # The process is asked before the records are read, so that they hold all that an ended one wrote.
        code = self._program.process.poll()
        found = self._recorded(notify)
        if self.is_over:
            self.close()
            return found
        silent_s = time.monotonic() - self._heard
        deadline_s = _START_S if self._begun is None else self._checks[0].deadline_s
        if code is None and (self.waits or silent_s <= deadline_s):
            return found
        lines = last_lines(self._program.log, _LOG_LINES)
        said = "\n".join(["The end of what it said:", *lines]) if lines else "It said nothing."
        ended = "" if code is None else ending(code, "ended with status")
        if not self._has_begun:
            how = ended or f"did not begin within {deadline_s:.0f} s"
            return found + self.left(f"its process {how}. {said}", passed=False)
        if self._begun is not None:
            how = ended or f"was not over within {deadline_s:.0f} s, and was ended"
            found.append(self._checks.pop(0).outcome(False, f"{how}. {said}", silent_s))
        self.close()
        if not self.is_over:
            self.start(self._folder)
        return found

    def left(self, reason: str, passed: bool | None = None) -> list[Outcome]:
        """Give up the checks that are left; return their outcomes."""
        self.close()
        checks, self._checks = self._checks, []
        return [check.outcome(passed, reason) for check in checks]

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self._program is not None:
            self._program.end()
        self._program = None

    def _recorded(self, notify: Callable[[str], None]) -> list[Outcome]:
        with self._records.open(encoding="utf-8") as records:
            records.seek(self._read)
            text = records.read()
        lines, newline, _ = text.rpartition("\n")
        self._read += len((lines + newline).encode())
        found = []
        for line in lines.splitlines():
            [(word, value)] = json.loads(line).items()
            self._heard = time.monotonic()
            if word == "waits":
                self.waits = True
            elif word == "begins":
                self._begun, self._has_begun = value, True
                notify(f"{self._name}: {value}")
            else:
                found.append(decoded(Outcome, value))
                self._checks.pop(0)
                self._begun = None
        return found
