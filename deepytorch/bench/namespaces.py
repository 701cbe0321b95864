"""Network namespaces without a name, and the processes inside of them.

A namespace lives as long as a process or a file descriptor holds it: nothing has to be removed by hand. Run as a
script, this file is the keeper that ends all processes left inside when its parent dies: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # of <sched.h>; os.setns and os.unshare came with Python 3.12
_END_LIMIT_S = 5.0


def create() -> int:
    """Make a network namespace and return the file descriptor that keeps it alive. Raises `OSError`."""

    def leave() -> int:
        _call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_fresh_thread(leave)


def inside(namespace: int, function: Callable[[], T]) -> T:
    """Call `function` in a thread inside `namespace`: its processes and sockets belong there."""

    def enter() -> T:
        _call("setns", namespace, _CLONE_NEWNET)
        return function()

    return _in_fresh_thread(enter)


def processes_in(namespaces: Collection[int]) -> list[int]:
    """Return the ids of the processes inside of any of `namespaces`, never this one's."""
    wanted = {(stat.st_dev, stat.st_ino) for stat in map(os.fstat, namespaces)}
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):  # the process has ended since
            stat = os.stat(f"/proc/{pid}/ns/net")
            if (stat.st_dev, stat.st_ino) in wanted and pid != os.getpid():
                found.append(pid)
    return found


def end_processes(namespaces: Collection[int]) -> list[int]:
    """Kill every process inside of `namespaces`, whatever its parent, group or session.

    Returns the ids of those that still exist after 5 seconds (waiting for a device, say).
    """
    deadline = time.monotonic() + _END_LIMIT_S
    num_empty_scans = 0  # one scan can miss the child of a process that ends by itself meanwhile
    left: list[int] = []
    while num_empty_scans < 2 and time.monotonic() < deadline:
        left = processes_in(namespaces)
        num_empty_scans = 0 if left else num_empty_scans + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            time.sleep(0.01)
    return left


def keeper_command(namespaces: Collection[int]) -> list[str]:
    """Return the command of a keeper, which has to inherit `namespaces` and a pipe from its parent as stdin."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *map(str, namespaces)]


def _keep(namespaces: Collection[int]) -> None:
    """Wait until the parent has ended in any way, then end everything that it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):  # the other end closes with the parent
        pass
    end_processes(namespaces)


def _in_fresh_thread(function: Callable[[], T]) -> T:
    """Call `function` in a new thread: only that thread changes its namespace, and then ends."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    _keep([int(argument) for argument in sys.argv[1:]])
