"""The queue of graphs that are compiled in the background, and the process that compiles them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from deepytorch.background import start
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.worker import keys, store
from deepytorch.compiler.code.worker.graph_data import to_bytes
from deepytorch.compiler.code.worker.job import Job
from deepytorch.compiler.code.worker.process import send
from deepytorch.log import logger

HERE = "this process"  # compiles while training waits, see `compilers.InPlace`


@dataclass(eq=False)
class Compilation:
    """One graph that is being compiled. Its fields may be set by another thread; `done` last.

    digest: the entry's on disk. error: why it came to nothing. seconds: of compiling. peak_mb: memory of the process
    that compiled. where: who compiles it. compiled: what runs it, where this process has compiled it.
    """

    name: str
    digest: str = ""
    asked: float = field(default_factory=time.perf_counter)
    error: str | None = None
    seconds: float = 0.0
    peak_mb: float = 0.0
    where: str = "a process"
    compiled: Callable[..., Any] | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self, error: str | None = None, seconds: float = 0.0, peak_mb: float = 0.0) -> None:
        """Note that the graph is compiled, or will not be."""
        self.error, self.seconds, self.peak_mb = error, seconds, peak_mb
        self.done.set()


def compile_in_worker(
    name: str,
    module: fx.GraphModule,
    arguments: Sequence[Any],
    varying: Sequence[tuple[int, ...]],
    lowering: RegionLowering,
) -> Compilation:
    """Have a graph compiled in the background for arguments like these; return at once.

    Raises `CannotSend` where no other process can compile it.
    """
    described = Job.of(module, arguments, varying, lowering)
    digest, job = described.digest(), to_bytes(described)
    is_kept = store.find(digest) is not None
    if described.gpu is not None and not is_kept:
        described.gpu.expect_memory()
    compilation = Compilation(name, digest)
    logger.info("%s is compiled in the background; training goes on in eager meanwhile", name)
    asked = _Asked(compilation, digest, MODEL.get(), job)
    if not is_kept:
        _hand_over(asked)
    else:
        compilation.where = "an earlier run"
        expect_no_longer()
        threading.Thread(target=_take, args=(asked,), name="deepytorch-load", daemon=True).start()
    return compilation


def _hand_over(asked: _Asked) -> None:
    """Have the worker compile a graph; start a worker if there is none."""
    global _WORKER
    with _LOCK:
        if _WORKER is None or not _WORKER.take(asked):
            _WORKER = _Worker()
            _WORKER.take(asked)
            _WORKER.start()


def differences_of_key(compilation: Compilation, key: keys.Key) -> list[str]:
    """Return how the key by which torch looks for a graph's code differs from that under which it was kept."""
    entry = store.find(compilation.digest)
    return keys.differences({} if entry is None else entry.key(), key)


def expect(model: str) -> None:
    """Start the worker for a model whose first graph is about to be traced and proved, on one core.

    The start of the worker takes as long as the trace. It is left out if an earlier run has kept a graph of the model.
    """
    global _WORKER
    if any(entry.about.get("model") == model for entry in store.entries()):
        return
    with _LOCK:
        if _WORKER is None or not _WORKER.is_alive():
            _WORKER = _Worker(patience=_EXPECTED_WITHIN)
            _WORKER.start()


def expect_no_longer() -> None:
    """Let a process end that was started for a job: it is not needed."""
    with _LOCK:
        if _WORKER is not None:
            _WORKER.is_enough()


def _take(asked: _Asked) -> None:
    """Use the entry of an earlier run; if another process drops it in between, have the graph compiled anew."""
    try:
        if _install(asked.digest):
            _warm_up()
            asked.compilation.finish()
        else:
            asked.compilation.where = "a process"
            _hand_over(asked)
    except OSError as error:
        asked.compilation.finish(error=f"{type(error).__name__}: {error}")


def _load(compilation: Compilation, digest: str, seconds: float, peak_mb: float) -> None:
    """Use the entry that the worker has kept; if it is gone, or nothing can be kept, torch looks in its own folder."""
    try:
        _install(digest)
        _warm_up()
    except OSError as error:
        compilation.finish(error=f"{type(error).__name__}: {error}")
    else:
        compilation.finish(None, seconds, peak_mb)


def _install(digest: str) -> bool:
    """Have torch find the entry of `digest`; return whether there is such an entry.

    Raises `OSError` if torch's cache folder cannot be written.
    """
    entry = store.find(digest)
    with contextlib.suppress(FileNotFoundError):
        if entry is not None:
            entry.install()
            return True
    return False


@dataclass(frozen=True, eq=False)
class _Asked:
    """One job for the worker."""

    compilation: Compilation
    digest: str
    model: str
    job: bytes


class _Worker(threading.Thread):
    """The worker: a process that compiles as long as there are jobs, and the thread that talks with it.

    patience: seconds for which the worker waits for a first job.
    """

    def __init__(self, patience: float = 0.0) -> None:
        super().__init__(name="deepytorch-compile", daemon=True)
        self._waiting: deque[_Asked] = deque()
        self._patience, self._ended = patience, False
        self._changed = threading.Condition(_LOCK)

    def take(self, asked: _Asked) -> bool:
        """Give the worker one more job; return False if it has ended."""
        with self._changed:
            if self._ended:
                return False
            self._waiting.append(asked)
            self._changed.notify()
            return True

    def is_enough(self) -> None:
        """Wait no longer for the job that the worker was started for."""
        with self._changed:
            self._patience = 0.0
            self._changed.notify()

    def _next(self) -> _Asked | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._patience, timeout=self._patience)
            self._patience = 0.0
            if self._waiting:
                return self._waiting.popleft()
            self._ended = True
            return None

    def _is_over(self) -> bool:
        """Return whether no job waits; if so, the worker takes no more."""
        with self._changed:
            self._ended = not self._waiting
            return self._ended

    def run(self) -> None:
        """Start the process, and hand it one job after the other."""
        process, worked = None, False
        while True:
            try:
                process = process or start(_MAIN)
            except OSError as failure:
                with _LOCK:
                    self._ended = True
                for each in self._waiting:
                    each.compilation.finish(error=f"no process could be started to compile in: {failure}")
                return
            if (asked := self._next()) is None:
                break
            worked = True
            with _progress(asked.compilation):
                answer = _answer(process, asked)
            if answer is None:  # only this job has failed: the jobs behind it get a new process
                process.communicate()
                asked.compilation.finish(error=f"the process that compiled it ended with {process.returncode}")
                process = None
                if self._is_over():
                    break
            elif "error" in answer:
                asked.compilation.finish(answer["error"])
            else:
                _load(asked.compilation, asked.digest, seconds=answer["seconds"], peak_mb=answer["peak_mb"])
        if process is not None:
            if not worked:  # the process may still be importing
                process.terminate()
            process.communicate()  # this ends the process and frees its memory


def _warm_up() -> None:
    """Do what the first load of compiled code needs: import modules, and look at the CPU (by 15 processes)."""
    with contextlib.suppress(Exception):  # after a failure here it is done, or fails, where it is needed
        from deepytorch.torch_internals import compile_fx, pick_vec_isa  # noqa: F401

        pick_vec_isa()


@contextlib.contextmanager
def _progress(compilation: Compilation) -> Iterator[None]:
    """Show for how long a graph has been compiling, in a terminal and if messages of level INFO are on."""
    if not (logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
        yield
        return
    over = threading.Event()

    def show() -> None:
        while not over.wait(1.0):
            seconds = time.perf_counter() - compilation.asked
            sys.stderr.write(f"\rdeepytorch: {compilation.name} is being compiled, {seconds:.0f} s")
            sys.stderr.flush()
        sys.stderr.write("\r\033[K")

    thread = threading.Thread(target=show, name="deepytorch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1.0)


def _answer(process: subprocess.Popen[bytes], asked: _Asked) -> dict[str, Any] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        send(process.stdin, asked.digest, asked.model, asked.job)
        return dict(json.loads(process.stdout.readline()))
    except (OSError, ValueError):
        return None


_MAIN = "from deepytorch.compiler.code.worker.process import main; main({parent})"
# The model whose graphs are compiled now: their entries on disk are listed by its name.
MODEL: ContextVar[str] = ContextVar("deepytorch_model", default="")
_LOCK = threading.RLock()
_WORKER: _Worker | None = None
_EXPECTED_WITHIN = 60.0  # seconds; for a trace, and the step that profiles the uses of outputs


def _begin_anew() -> None:
    """Forget the worker and the lock in a child made by `fork`: both belong to the parent and its threads."""
    global _WORKER, _LOCK
    _WORKER, _LOCK = None, threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)
