"""The common part of every rank's process: read the plan, join the others, report, and leave a message on failure."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from deepytorch.bench.results import decoded
from deepytorch.errors import ConfigError
from deepytorch.switch import SWITCH

Plan = TypeVar("Plan")
Tell = Callable[..., None]
"""Adds a record of these names and values to the file that the parent process reads, on rank 0."""


def run_rank(kind: type[Plan], work: Callable[[Plan, Tell], Any]) -> None:
    """Run `work` as one rank with the plan, a `kind`, in the file `sys.argv[1]`; its answer becomes the record "done".

    The plan's folder holds the store over which ranks meet in a gloo group, and takes the records (`records.jsonl`). A
    rank that fails leaves `rankR.error`: when it failed (of the system-wide monotonic clock) and how. With
    `--watch-stdin`, the process ends as soon as the process at the other end of its stdin is gone.
    """
    path, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    SWITCH.enabled = False  # arms decide themselves what is compiled
    if "--watch-stdin" in sys.argv:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    try:
        plan: Any = decoded(kind, json.loads(path.read_text(encoding="utf-8")))
        with (path.parent / "records.jsonl").open("a", encoding="utf-8") as records:

            def tell(**record: Any) -> None:
                if rank == 0:
                    records.write(json.dumps(record) + "\n")
                    records.flush()

            _join(plan.timeout_s, store=dist.FileStore(str(path.parent / "store"), ranks), rank=rank, world_size=ranks)
            tell(done=work(plan, tell))
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


@contextlib.contextmanager
def torchrun_rank(timeout_s: float) -> Iterator[int]:
    """Join torchrun's ranks in a gloo group, until all have done their part; return this process's rank."""
    _join(timeout_s)
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def end_with_stdin() -> None:
    """End this process when the process at the other end of its stdin is gone."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


def _join(timeout_s: float, **given: Any) -> None:
    """Open the gloo group over which ranks exchange measurements."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **given)


def ranks_of_host(ranks: int | None, hosts: int, shape: tuple[int, int] | None) -> int:
    """Return the number of ranks of a host: `ranks`, or that of torchrun's `shape`. Raises `ConfigError` for both."""
    if shape is None:
        return 2 if ranks is None else ranks
    if ranks is not None or hosts > 1:
        raise ConfigError("torchrun has started the ranks (RANK is set): leave --ranks and --hosts out, or unset RANK.")
    return shape[0]


def torchrun_shape() -> tuple[int, int] | None:
    """Return (ranks of a host, hosts) when torchrun started this process, else None. Raises `ConfigError`."""
    if "RANK" not in os.environ:
        return None
    try:
        ranks = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK is set, but WORLD_SIZE or LOCAL_WORLD_SIZE is not a number ({error}). Start with torchrun, or unset "
            "RANK."
        ) from error
    return local, max(1, ranks // local)
