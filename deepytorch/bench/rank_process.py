"""The common part of every rank's process: read the plan, report results, and leave a message on failure."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepytorch.switch import SWITCH

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of this process, and its way to report: `tell` adds a line to the records, on rank 0."""

    rank: int
    ranks: int
    store: dist.FileStore
    tell: Tell


def run_rank(work: Callable[[dict[str, Any], Seat], None]) -> None:
    """Run `work` with the plan of `sys.argv[1]` as one rank; the plan's folder holds the store and takes the results.

    Rank 0 adds lines to `records.jsonl`. A rank that fails leaves `rankR.error`: when it failed (of the system-wide
    monotonic clock) and how. With `--watch-stdin`, the process ends as soon as the process at the other end of its
    stdin is gone.
    """
    path, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    SWITCH.enabled = False  # arms decide themselves what is compiled
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all foreground processes: the parent ends this one
    if "--watch-stdin" in sys.argv:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        with (path.parent / "records.jsonl").open("a", encoding="utf-8") as records:

            def tell(record: dict[str, Any]) -> None:
                if rank == 0:
                    records.write(json.dumps(record) + "\n")
                    records.flush()

            work(plan, Seat(rank, ranks, dist.FileStore(str(path.parent / "store"), ranks), tell))
        dist.destroy_process_group()
    except BaseException:
        text = traceback.format_exc()
        report = path.parent / f"rank{rank}.error"
        unfinished = report.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"at_s": time.monotonic(), "error": text}), encoding="utf-8")
        unfinished.rename(report)
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(1)  # skips the destructors of groups in which collectives still hang


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)
