"""Groups of checks, each in a process of its own: a crash, a hang or a broken device ends only that process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deepytorch.bench.processes import Program, ending, last_lines
from deepytorch.gpu_check.outcome import Check, Outcome

WORKER = (sys.executable, "-m", "deepytorch.gpu_check.worker")

_TOGETHER = 4  # processes at a time, except for timed groups: most of a check is compilation on the host
_START_S = 90.0  # for a process to load torch and to begin
_POLL_S = 0.05
_LOG_LINES = 6


def run_groups(
    checks: Sequence[Check],
    device: str,
    seconds: float,
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> list[Outcome]:
    """Make all checks, and return the outcomes in the order in which they were known.

    Checks of one group follow each other in one process; after a check that crashed, hung or broke the device a new
    process makes the rest. Checks that are not over within `seconds` are reported as not made. No process is left.
    """
    names = list(dict.fromkeys(check.group for check in checks))
    groups = [_Group(name, [each for each in checks if each.group == name], device, worker) for name in names]
    waiting, running, found = sorted(groups, key=lambda group: group.is_timed), list[_Group](), list[Outcome]()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="deepytorch-gpu-check-") as folder, contextlib.ExitStack() as stack:
        while waiting or running:
            if time.monotonic() > end:
                for group in (*running, *waiting):
                    found += group.left(f"not over within {seconds:.0f} s")
                break
            while waiting and len(running) < (1 if waiting[0].is_timed or _any_timed(running) else _TOGETHER):
                running.append(waiting.pop(0))
                stack.callback(running[-1].close)
                running[-1].start(Path(folder))
            for group in list(running):
                found += group.listen(notify)
                if group.is_over:
                    running.remove(group)
            time.sleep(_POLL_S)
    return found


def _any_timed(running: Sequence[_Group]) -> bool:
    return any(group.is_timed for group in running)


class _Group:
    """The checks of one group, and the process that makes them."""

    def __init__(self, name: str, checks: Sequence[Check], device: str, worker: Sequence[str]) -> None:
        self._name, self._checks, self._device, self._worker = name, checks, device, worker
        self.is_timed = any(check.is_timed for check in checks)
        self._program: Program | None = None
        self._num_started = self._next = 0
        self._has_begun = False  # whether this process has begun any check
        self._begun: int | None = None  # the check that is being made
        self._heard = 0.0
        self._folder = Path()

    @property
    def is_over(self) -> bool:
        """Return whether no check is left to be made."""
        return self._next >= len(self._checks)

    def start(self, folder: Path) -> None:
        """Start a process for the checks that are left; its files are in `folder`."""
        self.close()
        self._folder, self._begun, self._has_begun, self._heard = folder, None, False, time.monotonic()
        self._num_started += 1
        stem = f"{self._name.replace(' ', '-')}-{self._num_started}".replace("/", "-")
        self._records = folder / f"{stem}.jsonl"
        self._records.touch()
        self._read = 0
        command = [*self._worker, str(self._records), self._name, str(self._next), self._device]
        self._program = Program(command, folder / f"{stem}.log", stdin=subprocess.PIPE)  # closes when this process ends

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
        deadline_s = _START_S if self._begun is None else self._checks[self._begun].deadline_s
        if code is None and silent_s <= deadline_s:
            return found
        lines = last_lines(self._program.log, _LOG_LINES)
        said = "\n".join(["The end of what it said:", *lines]) if lines else "It said nothing."
        ended = "" if code is None else ending(code, "ended with status")
        if not self._has_begun:
            how = ended or f"did not begin within {deadline_s:.0f} s"
            return found + self.left(f"its process {how}. {said}", passed=False)
        if self._begun is not None:
            how = ended or f"was not over within {deadline_s:.0f} s, and was ended"
            found.append(self._outcome(self._begun, False, f"{how}. {said}", silent_s))
            self._next = self._begun + 1
        self.close()
        if not self.is_over:
            self.start(self._folder)
        return found

    def left(self, reason: str, passed: bool | None = None) -> list[Outcome]:
        """Give up the checks that are left; return their outcomes."""
        self.close()
        numbers, self._next = range(self._next, len(self._checks)), len(self._checks)
        return [self._outcome(number, passed, reason, 0.0) for number in numbers]

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
            record = json.loads(line)
            self._heard = time.monotonic()
            if "begins" in record:
                self._begun, self._has_begun = int(record["begins"]), True
                notify(f"{self._name}: {self._checks[self._begun].name}")
            else:
                found.append(Outcome(**record["outcome"]))
                self._next, self._begun = self._next + 1, None
        return found

    def _outcome(self, number: int, passed: bool | None, said: str, seconds: float) -> Outcome:
        return Outcome(self._name, self._checks[number].name, passed, said, round(seconds, 2))
