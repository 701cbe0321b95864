"""The processes of `deepytorch bench hosts`: the ranks of a script, started, given their turns, and ended."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepytorch.bench.alternation import TurnGiver, alternate
from deepytorch.bench.hosts_worker import HostJob
from deepytorch.config import process_environment


class ScriptFailed(Exception):
    """A process of a script failed; the error holds the end of its output."""


class Script:
    """One job in its own processes, with or without the import of deepytorch.

    timeout_s: seconds from now until `result` gives up. in_turns: steps run only when `step` is called.
    """

    def __init__(
        self, job: HostJob, folder: Path, ranks: int, timeout_s: float, *, on: bool, in_turns: bool = False
    ) -> None:
        self._folder, self._how = folder, "with the import" if on else "without the import"
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._turns = TurnGiver(ranks) if in_turns else None
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(job), default=str), encoding="utf-8")
        environment = {
            **process_environment(),
            "DEEPYTORCH": "on" if on else "off",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            pipes = () if self._turns is None else self._turns.handed_over[rank]
            with self._log(rank).open("w", encoding="utf-8") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "deepytorch.bench.hosts_worker", str(path), *map(str, pipes)],
                        env=environment | own, stdout=log, stderr=subprocess.STDOUT, pass_fds=pipes,
                    )
                )  # fmt: skip
        if self._turns is not None:
            self._turns.started()

    def step(self) -> bool:
        """Let every rank run one step; return False if there is none left. Raises `ScriptFailed` at the deadline."""
        assert self._turns is not None
        try:
            return self._turns.give(self._deadline)
        except TimeoutError:
            raise self._late() from None

    def result(self) -> list[dict[str, Any]]:
        """Wait for the end; return the results of each rank. Raises `ScriptFailed`."""
        try:
            codes = [process.wait(max(self._deadline - time.monotonic(), 0.0)) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise self._late() from None
        for rank, code in enumerate(codes):
            if code:
                lines = self._log(rank).read_text(encoding="utf-8").strip().splitlines()
                said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")
                raise ScriptFailed(f"failed {self._how}: {said.strip()[:300]}")
        files = [self._folder / f"rank{rank}.json" for rank in range(len(self._processes))]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def end(self) -> None:
        """Kill all processes that still run."""
        for process in self._processes:
            process.kill()
            process.wait()
        if self._turns is not None:
            self._turns.close()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _late(self) -> ScriptFailed:
        return ScriptFailed(f"no end after {self._timeout_s:g} s {self._how}")


def results(*scripts: Script) -> list[list[dict[str, Any]]]:
    """Return the results of the ranks of each script, after all have ended. Steps of several scripts alternate."""
    try:
        if len(scripts) > 1:
            alternate([script.step for script in scripts])
        return [script.result() for script in scripts]
    finally:
        for script in scripts:
            script.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
