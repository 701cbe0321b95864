"""The run of a command whose Python processes are profiled, and what is made of their records."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from deepytorch.bench.results import write_json, write_text
from deepytorch.errors import DataError
from deepytorch.profile.page import page
from deepytorch.profile.records import Job, read_ranks
from deepytorch.profile.summary import Profile, merge_traces, summarise

TRACE, PAGE, FIGURES = "trace.json", "profile.html", "profile.json"


def profile(
    command: Sequence[str], shown: str, environment: Mapping[str, str], job: Job, out: Path, stdout: int | None = None
) -> tuple[int, Profile | None]:
    """Run a command and write its profile into the folder `out`, which is made before it starts.

    Args:
        command: The command, with the path of its program.
        shown: The command as the user gave it.
        environment: Its environment.
        job: The settings; its folder is made here.
        out: The folder for the results.
        stdout: As for `Popen`.

    Returns:
        The exit status, and the profile: None if no process has made a training step.

    Raises:
        DataError: the folder cannot be made, or cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The folder {out} cannot be made: {error.strerror}. Give another one with --out.") from error
    with tempfile.TemporaryDirectory(prefix="deepytorch-profile-") as folder:  # made for this user alone
        job = replace(job, folder=Path(folder))
        job.write()
        status = _run(command, {**environment, "DEEPYTORCH_PROFILE": folder}, stdout)
        ranks = read_ranks(job.folder)
        if not ranks:
            return status, None
        found = summarise(shown, ranks)
        has_trace = merge_traces(ranks, out / TRACE)
    if not has_trace:
        (out / TRACE).unlink(missing_ok=True)  # of an earlier profile
    write_json(out / FIGURES, found.to_json())
    write_text(out / PAGE, page(found, TRACE if has_trace else None), "--out")
    return status, found


def _run(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """Run a command to its end; signals to this process reach it. Return its exit status as a shell gives it."""
    process = subprocess.Popen(command, env=environment, stdout=stdout)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before: dict[int, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command, too
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
