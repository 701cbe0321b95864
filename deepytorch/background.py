"""Processes that work beside training: of low priority, out of Ctrl-C's reach, and gone when their parent is."""

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

# At the head of code that is given to an interpreter: the working directory is no place to import from, unless this
# process imports from there too. Where PYTHONSAFEPATH is set it is not on the path at all.
NOT_FROM_HERE = "import sys; sys.path[:] = filter(None, sys.path); "
_NICE = 10
_ENDING = threading.Event()


def start(code: str, **variables: str) -> subprocess.Popen[bytes]:
    """A Python process that runs `code`, with pipes for its input and output, and with these environment variables.

    The code is to call `end_with_parent` first; `{parent}` in it stands for this process. Raises `OSError`.
    """
    environment = dict(process_environment())
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment["DEEPYTORCH"] = "off"  # it arms nothing
    environment.update(variables)
    # A group of processes of its own, which Ctrl-C does not reach. Not a session: the scheduler of Linux shares the CPU
    # out among sessions first (autogroup), and being nice would count for nothing.
    setup = f"{NOT_FROM_HERE}import os; os.setpgid(0, 0); os.nice({_NICE}); "
    process = subprocess.Popen(
        [sys.executable, "-c", setup + code.replace("{parent}", str(os.getpid()))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        env=environment,
    )
    _STARTED[:] = [each for each in _STARTED if each.poll() is None] + [process]
    return process


_STARTED: list[subprocess.Popen[bytes]] = []


def is_working() -> bool:
    """Whether a process that `start` has started is still at it."""
    return any(each.poll() is None for each in list(_STARTED))


def end_with_parent(parent: int, scratch: Path | None = None) -> None:
    """In such a process: end it, and all that it has started, soon after `parent` has ended. scratch: goes with it.

    Its input tells nothing: a process that the parent has forked may hold it open. Where memory is short, it is what is
    given up, and not what trains.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_watch, args=(parent, scratch), daemon=True).start()


def is_ending() -> bool:
    """Whether this process is being ended because its parent has."""
    return _ENDING.is_set()


def _watch(parent: int, scratch: Path | None) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    _ENDING.set()
    os.killpg(0, signal.SIGTERM)  # a compiler takes its temporary files along
    time.sleep(0.5)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _terminate(*_: object) -> None:
    """Others may end this process; when it ends those that it has started, it goes last."""
    if not _ENDING.is_set():
        sys.exit(128 + signal.SIGTERM)
