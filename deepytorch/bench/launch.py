"""The ranks of a benchmark's setups as processes: started, given jobs and turns, and ended however it ends.

They run on this machine, on hosts of the lab, or, where torchrun has started the benchmark itself as ranks, one beside
each of these, so that a cluster is measured by the same code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch.bench.benchmark import Place, Setup
from deepytorch.bench.channel import DOING, DONE, ENDED, FAILED, FOUND, GO, NO_MEMORY, READY, Channel
from deepytorch.bench.lab import Lab, LabOptions
from deepytorch.bench.processes import Program, ending, last_lines, meeting_point, rank_environment
from deepytorch.config import process_environment
from deepytorch.errors import DeepytorchError

WORKER = (sys.executable, "-m", "deepytorch.bench.worker")
_LAST_WORDS_S = 0.5  # for ranks that fail together to say why: the first is the cause
_END_S = 10.0  # for a rank to end by itself after its last job
_LOG_LINES = 15
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")  # of this process, not of its ranks

Notify = Callable[[str], None]


class RankError(DeepytorchError, RuntimeError):
    """A rank failed, or all of them stood still. reason: the same in a few words, for a table."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class Ranks:
    """The processes of one setup.

    Args:
        setup: The setup; its job is not looked at.
        place: Where they run.
        folder: For their logs.
        timeout_s: After so many seconds without a sign of life from any rank all are ended.
        lab: The simulated hosts, if the place has a rate.
        own: Of a process that torchrun has started: the variables of the one rank that is started beside it, if any.
    """

    def __init__(
        self,
        setup: Setup,
        place: Place,
        folder: Path,
        timeout_s: float,
        lab: Lab | None = None,
        own: Mapping[str, str] | None = None,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.name, self._timeout_s = setup.name, timeout_s
        environment = {
            "DEEPYTORCH": "on" if setup.imports else "off",
            "DEEPYTORCH_COMPILE": "background",  # as users run it; the command line's own default is to wait
            "TOKENIZERS_PARALLELISM": "false",
            **({} if place.threads is None else {"OMP_NUM_THREADS": str(place.threads)}),
            **setup.environment,
        }
        count = place.all_ranks if own is None else bool(own)
        self._channels = [Channel() for _ in range(count)]
        self._doing = "the start"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        ends = [each.rank_end.fileno() for each in self._channels]
        logs = folder / setup.name
        if lab is not None:
            for rank in lab.start(command, environment, logs, stdins=ends):
                self._processes.append(rank.process)
                self._logs.append(rank.log)
        else:
            logs.mkdir(exist_ok=True)
            shared = {name: value for name, value in process_environment().items() if name not in _TORCHRUN}
            shared |= environment
            if own is None and count > 1:
                shared |= meeting_point()
                if sys.platform == "linux":
                    shared.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other interface has to be up
            for number in range(count):
                variables = own if own is not None else rank_environment(number, count) if count > 1 else {}
                log = logs / f"rank{number}.log"
                program = Program(command, log, env={**shared, **variables}, stdin=ends[number])
                self._processes.append(program.process)
                self._logs.append(log)
        for channel in self._channels:
            channel.started()

    def give(self, kind: str, job: Mapping[str, Any], notify: Notify) -> bool:
        """Give all ranks a job, and wait until each is ready for its first step; return False if it has none."""
        self._doing = "the beginning of a job"
        for channel in self._channels:
            channel.send({"kind": kind, "job": job})
        return self._are_ready(notify)

    def step(self, notify: Notify) -> bool:
        """Let all ranks run the step that they are ready for; return whether they are ready for another one."""
        for channel in self._channels:
            channel.send({GO: True})
        self._expect(DONE, notify)
        return self._are_ready(notify)

    def found(self) -> list[dict[str, Any]]:
        """Return what each rank has found, once no rank has a step left."""
        return self._found

    def end(self, *, at_once: bool = True) -> None:
        """End all processes. at_once: by force; else those that wait for a job end by themselves."""
        if not at_once:
            for channel in self._channels:
                channel.send({GO: False})
            deadline = time.monotonic() + _END_S
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.0))
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for channel in self._channels:
            channel.close()

    def _are_ready(self, notify: Notify) -> bool:
        found = self._expect(READY, notify)
        if found and FOUND not in found[0]:
            return True
        self._found = [each[FOUND] for each in found]
        return False

    def _expect(self, word: str, notify: Notify) -> list[dict[str, Any]]:
        """Return the next message of each rank that is no sign of life: `word`, or what it has found."""
        heard = time.monotonic()
        found: dict[int, dict[str, Any]] = {}
        while True:
            for rank, channel in enumerate(self._channels):
                while rank not in found and (message := channel.next_message()) is not None:
                    if message is ENDED or FAILED in message:
                        raise self._failure(rank, message)
                    if DOING in message:
                        self._doing = message[DOING]
                        if rank == 0:
                            notify(f"{self.name}: {self._doing}")
                    elif word in message or FOUND in message:
                        found[rank] = message
            if len(found) == len(self._channels):
                return [found[rank] for rank in range(len(self._channels))]
            if Channel.listen(self._channels, heard + self._timeout_s):
                heard = time.monotonic()
            else:
                raise self._stalled(next(rank for rank in range(len(self._channels)) if rank not in found))

    def _failure(self, rank: int, message: dict[str, Any]) -> RankError:
        """Return the error of the rank that failed first: others fail because of it. A killed rank leaves no words."""
        words: dict[int, dict[str, Any]] = {}
        silent: list[int] = []

        def hear(rank: int, message: dict[str, Any]) -> None:
            if FAILED in message:
                words[rank] = message[FAILED]
            elif message is ENDED and rank not in words:
                silent.append(rank)

        hear(rank, message)
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(words) + len(silent) < len(self._channels) and Channel.listen(self._channels, deadline):
            for other, channel in enumerate(self._channels):
                while (more := channel.next_message()) is not None:
                    hear(other, more)
        first = silent[0] if silent else min(words, key=lambda each: words[each]["at_s"])
        if first in words:
            how, reason = "failed", words[first]["error"]
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what it held of a GPU may take a while to be freed
                self._processes[first].wait(_END_S)
            code = self._processes[first].poll()
            how, reason = ending(code or 0, "ended with exit status"), "it left no error"
            if code == -signal.SIGKILL:
                reason = f"as the system does when it is {NO_MEMORY}"
        where = f"Rank {first} of {len(self._processes)}" if len(self._processes) > 1 else "The process"
        return RankError(
            f"{where} of {self.name} {how} at: {self._doing}. {reason}. All ranks were ended. {self._tail(first)}",
            reason if first in words else f"{how}, {reason}",
        )

    def _stalled(self, rank: int) -> RankError:
        short = f"stood still for {self._timeout_s:g} s at: {self._doing}"
        return RankError(
            f"The ranks of {self.name} {short}. All ranks were ended. If they were only slow, give a larger --timeout. "
            f"{self._tail(rank)}",
            short,
        )

    def _tail(self, rank: int) -> str:
        lines = last_lines(self._logs[rank], _LOG_LINES)
        return "\n".join([f"The end of the log of rank {rank}:", *lines]) if lines else f"Rank {rank} has said nothing."


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder for logs that only this user can read, and remove it."""
    with tempfile.TemporaryDirectory(prefix="deepytorch-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def lab_of(place: Place) -> LabOptions | None:
    """Return the simulated hosts of a place; None for this machine alone."""
    if place.rate is None:
        return None
    return LabOptions(hosts=place.hosts, ranks=place.ranks, rate=place.rate, flow_rate=place.flow_rate)
