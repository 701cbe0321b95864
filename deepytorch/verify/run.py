"""The three runs of a script, each in a process of its own: with the import, without, and moved; and the comparison."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.bench.processes import Program, last_lines
from deepytorch.config import process_environment
from deepytorch.errors import ScriptError
from deepytorch.verify.compare import Compared, compare, plain
from deepytorch.verify.records import MOVED, WITH, WITHOUT, Job, Run, VerifyOptions, read_run

_GRACE_S = 30.0  # time for a process to end by itself, once everything is written
_LAST_LINES = 20
_TELL = {
    WITHOUT: "without the import (1 of 3)",
    WITH: "with the import (2 of 3)",
    MOVED: "without the import, weights moved by their last bit (3 of 3)",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict: every number of both runs, in order, and the runs themselves."""

    options: VerifyOptions
    without: Run
    with_import: Run
    moved: Run
    compared: list[Compared]

    @property
    def differences(self) -> list[Compared]:
        """Return the numbers whose differences are more than allowed, the first one first."""
        return [each for each in self.compared if not each.agrees]

    @property
    def agrees(self) -> bool:
        """Return whether the script trains as it does without the import."""
        return self.with_import.failure is None and not self.differences

    @property
    def num_packed(self) -> int:
        """Return the number of packed steps of all regions."""
        return int(self.with_import.report.get("steps_packed", 0))

    def regions_in(self, step: int | None) -> tuple[list[str], list[str]]:
        """Return the names of regions that ran packed, and padded, in a step.

        None, or a step that has not ended, means any step.
        """
        steps = self.with_import.packed
        now = steps.get(step, []) if step in steps else steps.get(max(steps, default=0), [])
        before = (
            {number: counts for number, (_, *counts) in enumerate(steps.get(step - 1, []))} if step in steps else {}
        )
        packed = [name for number, (name, count, _) in enumerate(now) if count > before.get(number, (0, 0))[0]]
        padded = [name for number, (name, _, count) in enumerate(now) if count > before.get(number, (0, 0))[1]]
        return packed, padded

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        first = self.differences[0].to_json() if self.differences else None
        packed, padded = self.regions_in(self.differences[0].step) if self.differences else ([], [])
        runs = {WITHOUT: self.without, WITH: self.with_import, MOVED: self.moved}
        return {
            "command": list(self.options.command),
            "steps": {name: run.steps for name, run in runs.items()},
            "seed": self.options.seed,
            "tolerance": self.options.tolerance,
            "agrees": self.agrees,
            "failure": self.with_import.failure,
            "differs_first": None if first is None else {**first, "packed": packed, "padded": padded},
            "differences": [each.to_json() for each in self.differences],
            "compared": len(self.compared),
            "losses": {name: [plain(value) for value in run.losses()] for name, run in runs.items()},
            "draws_random_numbers": self.without.draws,
            "sensitivity_failure": self.moved.failure,
            "report": self.with_import.report,
        }


def verify(options: VerifyOptions, notify: Callable[[str], None] = lambda _: None) -> Verdict:
    """Run the script in three processes, one after another, and compare. Raises `ScriptError` if it fails by itself."""
    with tempfile.TemporaryDirectory(prefix="deepytorch-verify-") as folder:  # made for this user alone
        without = _run(options, WITHOUT, Path(folder), notify)
        refuse_without_training(options, without)
        with_import = _run(options, WITH, Path(folder), notify)
        moved = _run(options, MOVED, Path(folder), notify)
        notify("Comparing")
        usable = moved if moved.failure is None else None
        compared = compare(without, with_import, usable, options.tolerance)
    return Verdict(options, without, with_import, moved, compared)


def _run(options: VerifyOptions, role: str, folder: Path, notify: Callable[[str], None]) -> Run:
    """Make one run; an error is in its `failure`."""
    notify(f"Running {_TELL[role]}")
    own = folder / role
    own.mkdir(mode=0o700)
    job = Job(options=options, role=role, folder=own)
    job.write(own / "job.json")
    environment = {"PYTHONHASHSEED": str(options.seed % 2**32), **process_environment()}
    environment["DEEPYTORCH"] = "on" if role == WITH else "off"
    command = [sys.executable, "-m", "deepytorch.verify.worker", str(own / "job.json")]
    program = Program(command, own / "output.txt", env=environment)
    try:
        in_time = _wait(program.process, job, options.timeout_s)
    finally:
        program.end()
    run = read_run(job)
    if run.ended is None and run.failure is None:
        if not in_time:
            made = f"{run.steps} of {options.steps} steps made"
            run.failure = (
                f"It did not come to its end in {options.timeout_s:g} seconds ({made}); --timeout gives it more."
            )
        else:
            run.failure = f"Its process ended with status {program.process.returncode}."
    if run.failure is not None:
        run.output = "\n".join(last_lines(program.log, _LAST_LINES))
    return run


def _wait(process: subprocess.Popen[bytes], job: Job, timeout_s: float) -> bool:
    """Wait for the end or the deadline; return False if the deadline came first."""
    deadline = time.monotonic() + timeout_s
    written = False
    while process.poll() is None:
        if not written and job.ended.exists():
            written, deadline = True, time.monotonic() + _GRACE_S
        if time.monotonic() > deadline:
            return written
        time.sleep(0.05)
    return True


def refuse_without_training(options: VerifyOptions, run: Run) -> None:
    """Raise `ScriptError` if there is nothing to compare with."""
    script = " ".join(options.command)
    if run.failure is not None:
        told = f" Its last lines:\n{run.output}" if run.output else ""
        cause = "" if run.failure.startswith("Traceback") else f" {run.failure}"
        raise ScriptError(f"{script} fails without the import, so there is nothing to compare with.{cause}{told}")
    one_process = (
        "verify looks at one process: of a script that starts others (torchrun, mp.spawn), give it a form that trains "
        "in one."
    )
    if not run.optimizers:
        raise ScriptError(f"{script} made no optimizer of torch.optim; expected a script that trains. {one_process}")
    if not run.backwards:
        raise ScriptError(
            f"{script} made an optimizer and never called backward; expected a script that trains. {one_process}"
        )
    if not run.steps:
        raise ScriptError(
            f"{script} called backward {run.backwards} times and never the step of an optimizer; expected one step at "
            "least, so that there is something to compare."
        )
