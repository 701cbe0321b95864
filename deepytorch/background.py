"""Background processes: of low priority, out of Ctrl-C's reach, and ended with their parent."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from deepytorch.config import process_environment
from deepytorch.log import logger

# The begin of code for an interpreter: nothing is imported from the working directory, unless this process imports from
# there too. With PYTHONSAFEPATH set the working directory is not on the path at all.
NOT_FROM_HERE = "import sys; sys.path[:] = filter(None, sys.path); "
_NICE = 10
_ENDING = threading.Event()
# Ends the process if its parent ends while it still imports what it is to run, which may take long on a busy machine.
_WATCH_IMPORTS = """
import os, signal, sys, threading, time
os.setpgid(0, 0)
os.nice({nice})
def watch():
    while os.getppid() == {parent}:
        time.sleep(0.5)
        if getattr(sys.modules.get("deepytorch.background"), "IS_WATCHED", False):
            return
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
"""
IS_WATCHED = False  # whether `end_with_parent` was called in this process


def start(code: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `code`, with pipes for its input and output and these environment variables.

    The code has to call `end_with_parent` when it begins to work; `{parent}` in it stands for this process. Until then
    it is ended by force if this process ends. Raises `OSError`.
    """
    environment = dict(process_environment())
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment["DEEPYTORCH"] = "off"  # the process arms nothing
    environment.update(variables)
    # The process gets a process group of its own, which Ctrl-C does not reach. Not a session: Linux's scheduler divides
    # the CPU among sessions first (autogroup), so that niceness would have no effect.
    parent = os.getpid()
    setup = NOT_FROM_HERE + _WATCH_IMPORTS.format(nice=_NICE, parent=parent)
    process = subprocess.Popen(
        [sys.executable, "-c", setup + code.replace("{parent}", str(parent))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        env=environment,
    )
    _STARTED[:] = [each for each in _STARTED if each.poll() is None] + [process]
    return process


_STARTED: list[subprocess.Popen[bytes]] = []


def is_working() -> bool:
    """Return whether a process that `start` has started still runs."""
    return any(each.poll() is None for each in list(_STARTED))


def end_with_parent(parent: int, scratch: Path | None = None) -> None:
    """Make this background process, with all that it has started, end soon after `parent` has ended.

    scratch: a folder that is removed then. The end of its input would not tell: a process that the parent has forked
    may hold the pipe open. If memory is short, the kernel kills this process rather than the training.
    """
    global IS_WATCHED
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_watch, args=(parent, scratch), daemon=True).start()
    IS_WATCHED = True


def leave_with_parent() -> None:
    """Make this process, which the command line has started, end soon after the process that has started it."""
    parent = os.getppid()

    def leave() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def is_ending() -> bool:
    """Return whether this process is about to end because its parent has ended."""
    return _ENDING.is_set()


def _watch(parent: int, scratch: Path | None) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    _ENDING.set()
    os.killpg(0, signal.SIGTERM)  # lets a compiler remove its temporary files
    time.sleep(0.5)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _terminate(*_: object) -> None:
    """End this process on a signal of others; ignore its own signal to the processes that it has started."""
    if not _ENDING.is_set():
        sys.exit(128 + signal.SIGTERM)
