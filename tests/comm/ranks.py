"""Runs a script on several ranks of this host, each in a process of its own, all of them ended at a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm import WarmProcess

# What every script begins with. `init` makes the default group; `rank`, `size` say who this is.
_PRELUDE = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import deepytorch
import deepytorch.switch
from deepytorch.comm import Options
deepytorch.switch.SWITCH.enabled = False  # scripts say themselves what is compiled
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def init(backend="deepytorch", timeout=30.0, **options):
    where = "file://" + os.environ["RENDEZVOUS"] + options.pop("suffix", "")
    dist.init_process_group(
        backend, init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **options
    )

def told(call):
    '''The error that a call raises, and how long that took.'''
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return str(error), time.monotonic() - started
    raise SystemExit("no error was raised")

def say(*words):
    print(*words, flush=True)

def tell(word):
    '''Let the other ranks know, by no call of the group.'''
    open(f"{os.environ['RENDEZVOUS']}-{word}", "w").close()

def hear(word, seconds=60.0):
    '''Wait for `tell(word)` of another rank.'''
    deadline = time.monotonic() + seconds
    while not os.path.exists(f"{os.environ['RENDEZVOUS']}-{word}"):
        assert time.monotonic() < deadline, f"no rank told {word!r}"
        time.sleep(0.005)

def pretend_hosts(ranks_per_host):
    '''Make every so many ranks a host of their own: what goes between hosts then goes over loopback.'''
    from dataclasses import replace
    from deepytorch.comm.group import backend
    found = backend.discover_host()
    backend.discover_host = lambda: replace(found, id=f"host {rank // ranks_per_host}")
"""


@dataclass
class Outcome:
    """How one rank ended; `code` is None for one that had to be ended."""

    code: int | None
    output: str


@dataclass
class Ranks:
    """Processes that run one script, one for each rank."""

    script: str
    num_ranks: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    warm: bool = False

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        script = folder / "script.py"
        script.write_text(_PRELUDE + textwrap.dedent(self.script))
        self.logs = [folder / f"rank{rank}.log" for rank in range(self.num_ranks)]
        self.processes: list[subprocess.Popen[bytes] | WarmProcess] = []
        for rank, log in enumerate(self.logs):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                "RENDEZVOUS": str(folder / "rendezvous"),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
                **self.env,
            }
            log.touch()
            if self.warm:
                self.processes.append(WarmProcess(script, log, env))
                continue
            with log.open("w") as output:
                command, env = [sys.executable, str(script)], {**os.environ, **env}
                self.processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
        return self

    def wait(self, timeout: float = 30.0) -> list[Outcome]:
        """How every rank ended, those that had not by then having been ended."""
        deadline = time.monotonic() + timeout
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        return [Outcome(code, self.output(rank)) for rank, code in enumerate(codes)]

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self.logs[rank].read_text()

    def until(self, rank: int, text: str, timeout: float = 60.0) -> None:
        """Wait until a rank has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                raise AssertionError(f"rank {rank} did not print {text!r} but:\n{self.output(rank)}")
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()


def run(
    script: str, num_ranks: int = 2, timeout: float = 30.0, env: Mapping[str, str] | None = None, warm: bool = True
) -> list[str]:
    """The outputs of a script that has to succeed on every rank. Where its end is looked at, it must not be `warm`."""
    with Ranks(script, num_ranks, env or {}, warm) as ranks:
        outcomes = ranks.wait(timeout)
    said = [f"rank {rank} ended with {each.code}:\n{each.output[-3000:]}" for rank, each in enumerate(outcomes)]
    assert all(outcome.code == 0 for outcome in outcomes), "\n\n".join(said)  # the cause may be another rank's
    return [outcome.output for outcome in outcomes]
