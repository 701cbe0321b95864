"""Processes that a command starts: each in a session of its own, and ended with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path


class Program:
    """A command in a process, whose output goes to the file `log`. The other arguments are those of `Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Collection[int] = (),
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
                pass_fds=pass_fds,
            )

    def end(self) -> None:
        """End the process, and the others of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextlib.contextmanager
def sigterm_unwinds() -> Generator[None, None, None]:
    """Make SIGTERM end this process through its `finally` blocks. Outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines of a process's output."""
    return log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-count:]


def ending(code: int, failed: str) -> str:
    """Return in words how a process has ended. failed: the words before an exit status."""
    if code >= 0:
        return f"{failed} {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time one
        return f"was ended by signal {-code}"


def rank_environment(rank: int, ranks: int, per_host: int | None = None) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank. per_host: ranks of each host; None: all are on one."""
    host, local = divmod(rank, per_host or ranks)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host or ranks),
        "GROUP_RANK": str(host),
    }


def free_port() -> int:
    """Return a port of this host that no process has."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def meeting_point() -> dict[str, str]:
    """Return the variables that say where ranks meet: at a free port of this host."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
