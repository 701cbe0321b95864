"""The ranks of a measurement as processes: started, listened to, and ended however the measurement ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from deepytorch.bench.lab import Lab, LabOptions, Rank
from deepytorch.bench.processes import Program, ending, last_lines, rank_environment, sigterm_unwinds
from deepytorch.errors import DeepytorchError

_POLL_S = 0.05
_END_S = 20.0  # for a rank to end by itself after the measurement
_LAST_WORDS_S = 0.3  # for ranks that fail together to report why: the first is the cause
_LOG_LINES = 15


class RankError(DeepytorchError, RuntimeError):
    """A rank of a measurement failed, or all of them stood still."""


def run_ranks(
    plan: Any, ranks: int, lab: LabOptions | None, worker: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """Start the ranks that run `plan`, and yield the records of rank 0: see `rank_process`.

    `plan` is a dataclass with a `timeout_s`, which every rank gets. There are `ranks` of them on this machine, which
    talk over loopback, or those of `lab`. `worker` is the command of a rank; it gets the plan's file. The ranks meet at
    a file in a folder that only this user can read. When the generator ends or is closed, no process is left. Raises
    `RankError` when a rank fails, or when `plan.timeout_s` pass without a message, and `ConfigError` if the machine
    cannot have a lab.
    """
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="deepytorch-comm-")))
        plan_file, records_file = folder / "plan.json", folder / "records.jsonl"
        plan_file.write_text(json.dumps(asdict(plan), default=str), encoding="utf-8")  # default: for paths
        records_file.touch()
        running.enter_context(sigterm_unwinds())
        command = [*worker, str(plan_file)]
        started: list[Program | Rank] = []
        if lab is None:
            for rank in range(ranks):
                program = _start([*command, "--watch-stdin"], rank, ranks, folder)
                running.callback(program.end)
                started.append(program)
        else:
            started += running.enter_context(Lab(replace(lab, logs=folder))).start(command)
        records = running.enter_context(records_file.open(encoding="utf-8"))
        yield from _listen(records, started, folder, plan.timeout_s)


def found_by_ranks(
    plan: Any,
    ranks: int,
    lab: LabOptions | None,
    worker: Sequence[str],
    notify: Callable[[str], None],
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Any:
    """Start the ranks as `run_ranks` does, and return what rank 0 has found.

    `notify` is told what the ranks are doing, `on_record` gets every record. Raises as `run_ranks` does, and
    `RankError` if no rank ever finishes.
    """
    done: list[Any] = []
    with contextlib.closing(run_ranks(plan, ranks, lab, worker)) as records:
        for record in records:
            if "doing" in record:
                notify(record["doing"])
            if "done" in record:
                done.append(record["done"])
            on_record(record)
    if not done:
        raise RankError("The ranks ended before the measurement was complete, and none of them says why.")
    return done[0]


def _start(command: Sequence[str], rank: int, ranks: int, folder: Path) -> Program:
    """Start a rank on this machine."""
    environment = {**os.environ, **rank_environment(rank, ranks)}
    environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other interface has to be up, and none sees the traffic
    # The pipe to its stdin closes when this process ends in any way.
    return Program(command, folder / f"rank{rank}.log", stdin=subprocess.PIPE, env=environment)


def _listen(
    records: TextIO, ranks: Sequence[Program | Rank], folder: Path, timeout_s: float
) -> Generator[dict[str, Any], None, None]:
    """Yield the records until every process has ended successfully."""
    heard, rest, last, complete = time.monotonic(), "", "the start", False
    while True:
        codes = [rank.process.poll() for rank in ranks]
        *lines, rest = (rest + records.read()).split("\n")
        for line in lines:
            record = json.loads(line)
            complete = complete or "done" in record
            last = record.get("doing", last)
            yield record
            heard = time.monotonic()
        if any(codes):
            time.sleep(_LAST_WORDS_S)
            raise _failure(ranks, folder, last)
        if all(code == 0 for code in codes):
            return
        limit_s = _END_S if complete else timeout_s
        if time.monotonic() - heard > limit_s:
            left = [index for index, code in enumerate(codes) if code is None]
            raise RankError(
                f"The ranks {left} stood still for {limit_s:g} s at: {last}. All ranks were ended. If they were only "
                f"slow, give a larger --timeout. {_tail(ranks, left[0])}"
            )
        time.sleep(_POLL_S)


def _failure(ranks: Sequence[Program | Rank], folder: Path, last: str) -> RankError:
    """Return the error of the rank that failed first: others fail because of it. A killed rank leaves no message."""
    failed = {index: rank.process.returncode for index, rank in enumerate(ranks) if rank.process.poll()}
    words = {}
    for index in failed:
        with contextlib.suppress(OSError):
            words[index] = json.loads((folder / f"rank{index}.error").read_text(encoding="utf-8"))
    first = min(failed, key=lambda index: words[index]["at_s"] if index in words else 0.0)
    how = ending(failed[first], "failed with exit status")
    reason = words[first]["error"].strip().splitlines()[-1].rstrip(".") if first in words else "It left no error"
    return RankError(
        f"Rank {first} of {len(ranks)} {how} at: {last}. {reason}. All ranks were ended. {_tail(ranks, first)}"
    )


def _tail(ranks: Sequence[Program | Rank], index: int) -> str:
    lines = last_lines(ranks[index].log, _LOG_LINES)
    if not lines:
        return f"The log of rank {index} is empty."
    return "\n".join([f"The end of the log of rank {index}:", *lines])
