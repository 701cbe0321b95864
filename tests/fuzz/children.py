"""Trials in processes of their own: what crashes or hangs there is a find like any other, and not the end."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

from tests.fuzz.grammar import Trial
from tests.fuzz.training import Outcome, run

DEADLINE_S = 240.0  # of a trial
TRIALS = 12  # that one process runs: what a process keeps of them is gone with it


def outcomes(trials: Sequence[Trial], deadline_s: float = DEADLINE_S) -> Iterator[tuple[Trial, Outcome]]:
    """Run the trials, in order, in forked processes; yields each as it ends."""
    left = list(trials)
    while left:
        process, pipe = _fork(left[:TRIALS])
        try:
            for trial in left[:TRIALS]:
                outcome = _next(process, pipe, deadline_s)
                left.remove(trial)
                yield trial, outcome
                if outcome.kind in ("crashes", "hangs"):
                    break  # the others are for the next process
        finally:
            _end(process)
            os.close(pipe)


def _fork(trials: Sequence[Trial]) -> tuple[int, int]:
    sys.stdout.flush()
    receives, sends = os.pipe()
    process = os.fork()
    if process:
        os.close(sends)
        return process, receives
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        for trial in trials:
            try:
                outcome = run(trial)
            except BaseException:
                outcome = Outcome("crashes", traceback.format_exc().splitlines()[-30:], cases=len(trial.cases))
            os.write(sends, json.dumps(outcome.to_json()).encode() + b"\n")
    finally:
        os._exit(0)  # the interpreter's own last steps would take a second


def _next(process: int, pipe: int, deadline_s: float) -> Outcome:
    line, until = b"", time.monotonic() + deadline_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return Outcome("hangs", [f"no end after {deadline_s:g} s"])
        got = os.read(pipe, 65536)
        if not got:
            _, status = os.waitpid(process, 0)
            return Outcome("crashes", [f"ended with {os.waitstatus_to_exitcode(status)}"])
        line += got
    return Outcome(**json.loads(line))


def _end(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
