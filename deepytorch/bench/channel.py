"""Messages between a benchmark and the ranks that it has started: JSON lines over a socket, which is a rank's stdin.

The benchmark gives jobs and turns. The load of a machine changes from minute to minute, so setups that are compared
take turns, step by step: a rank says that it is ready for a step, sleeps until it may run it, and says that it is done.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

READY, DONE, GO, DOING, FOUND, FAILED = "ready", "done", "go", "doing", "found", "failed"
ENDED: dict[str, Any] = {"ended": True}  # in place of a message
NO_MEMORY = "out of memory"  # the error of a rank that finds none
_BYTES = 1 << 16


class Channel:
    """The benchmark's end."""

    def __init__(self) -> None:
        self._socket, self.rank_end = socket.socketpair()  # the rank's process inherits its end
        self._rest, self._has_ended = b"", False
        self._inbox: deque[dict[str, Any]] = deque()

    def started(self) -> None:
        """Close this process's copy of the rank's end: only then the end of the rank's process is noticed."""
        self.rank_end.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. A rank that has ended gets none; the next `receive` says so."""
        try:
            self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")
        except OSError:
            return

    def next_message(self) -> dict[str, Any] | None:
        """Return the next message that has come, `ENDED` if the rank's process has ended; None if there is none."""
        return self._inbox.popleft() if self._inbox else None

    @staticmethod
    def listen(channels: Sequence[Channel], deadline: float) -> bool:
        """Wait until a message has come from any rank; return whether one has by the deadline, on `time.monotonic()`.

        All ranks are read: one that nobody reads would stop once its socket is full, and others wait for it.
        """
        by_socket = {each._socket: each for each in channels if not each._has_ended}
        readable, _, _ = select.select(list(by_socket), [], [], max(deadline - time.monotonic(), 0.0))
        for ready in readable:
            by_socket[ready]._read()
        return bool(readable)

    def _read(self) -> None:
        try:
            more = self._socket.recv(_BYTES)
        except ConnectionError:
            more = b""
        *lines, self._rest = (self._rest + more).split(b"\n")
        self._inbox.extend(map(json.loads, lines))
        if not more:
            self._has_ended = True
            self._inbox.append(ENDED)

    def close(self) -> None:
        """Give no further jobs: a rank that waits for one ends."""
        self._socket.close()
        self.rank_end.close()


class Turns:
    """The rank's end. A rank whose benchmark is gone ends at once, whatever it does."""

    def __init__(self, descriptor: int = 0) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, descriptor)  # processes that this one starts have no part in it
        os.close(nothing)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next_job(self) -> dict[str, Any] | None:
        """Wait for a job and return it; None if there are no more."""
        found = self._inbox.get()
        return None if found == {GO: False} else found

    def take(self) -> None:
        """Wait until a step may be run."""
        self.say(READY)
        self._inbox.get()

    def hand_on(self) -> None:
        """Report that the step is done."""
        self.say(DONE)

    def say(self, word: str, value: Any = True) -> None:
        """Send a message: `DOING` with what the rank does, which also shows that it is alive; or a result."""
        self._socket.sendall(json.dumps({word: value}).encode() + b"\n")

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                more = self._socket.recv(_BYTES)
            except OSError:
                more = b""
            if not more:
                os._exit(1)
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                self._inbox.put(json.loads(line))
