"""The worker, a process that compiles graphs for another one: its input brings jobs, and its output takes answers.

The worker ends when its input does: when the process that started it has no more to compile, or has ended.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from filelock import FileLock

from deepytorch.background import end_with_parent
from deepytorch.compiler.code.worker import keys, store
from deepytorch.config import process_environment
from deepytorch.process_facts import peak_memory

_LENGTH = struct.Struct("!Q")


def send(stream: IO[bytes], digest: str, model: str, job: bytes) -> None:
    """Hand a job to the worker that reads from `stream`. digest: the entry's. model: a name for messages."""
    for part in (digest.encode(), model.encode(), job):
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def main(parent: int) -> None:
    """Compile until there is no more input. parent: the process that has started this one."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of a compiler must not be taken for answers
    place = store.folder()
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=place) as scratch:
        queue: SimpleQueue[tuple[str, str, bytes] | None] = SimpleQueue()
        threading.Thread(target=_read, args=(jobs, queue), daemon=True).start()
        end_with_parent(parent, Path(scratch))
        _import_compilers()  # before the temporary folder is set: headers that are compiled once are for all workers
        tempfile.tempdir = process_environment()["TMPDIR"] = scratch
        # Triton writes paths into its files, which are no use elsewhere. Inductor keeps each kernel with its graph.
        process_environment().setdefault("TRITON_CACHE_DIR", str(Path(scratch) / "triton"))
        while (found := queue.get()) is not None:
            answers.write(json.dumps(_compile(*found, place, Path(scratch))) + "\n")
            answers.flush()


def _import_compilers() -> None:
    """Import the compilers, which takes seconds; there may be no job yet."""
    from deepytorch.compiler.code.worker import job  # noqa: F401
    from deepytorch.torch_internals import compile_fx  # noqa: F401


def _read(jobs: IO[bytes], queue: SimpleQueue[tuple[str, str, bytes] | None]) -> None:
    parts: list[bytes] = []
    while len(head := jobs.read(_LENGTH.size)) == _LENGTH.size:
        parts.append(jobs.read(_LENGTH.unpack(head)[0]))
        if len(parts) == 3:
            queue.put((parts[0].decode(), parts[1].decode(), parts[2]))
            parts = []
    queue.put(None)


def _compile(digest: str, model: str, job: bytes, place: Path | None, scratch: Path) -> dict[str, object]:
    started, used = time.perf_counter(), _cpu_seconds()
    try:
        if place is None:  # no entry may be kept: torch's own folder is used
            _run(job)
        else:
            locks = place / ".locks"
            locks.mkdir(mode=0o700, exist_ok=True)
            with FileLock(locks / digest, mode=0o600):  # ranks compile the same
                if store.find(digest) is None:
                    made = scratch / "entry"
                    process_environment()["TORCHINDUCTOR_CACHE_DIR"] = str(store.files_of(made))
                    key = _run(job)
                    store.write_key(made, key)
                    seconds = time.perf_counter() - started
                    store.keep(made, place / digest, {"model": model, "seconds": seconds, "torch": _torch()})
                    store.trim()
                    store.remove_stale(place)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _cpu_seconds() - used,
        "peak_mb": peak_memory() / 2**20,
    }


def _run(job: bytes) -> keys.Key:
    """Compile a graph; return the parts of the key by which its code is found, where these are wanted."""
    from deepytorch.compiler.code.worker.job import Job
    from deepytorch.torch_internals import clear_inductor_caches

    clear_inductor_caches()  # code that an earlier job left in memory would be missing in this job's entry
    found = pickle.loads(job)
    assert isinstance(found, Job)
    with keys.seen(found.lowering.config.compiles_from_sizes) as key:
        found.compile()
    return key


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _cpu_seconds() -> float:
    return sum(
        each.ru_utime + each.ru_stime
        for each in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
