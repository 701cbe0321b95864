"""The processes of `bench hosts` and `bench compute`: ranks of a script, started, given their turns, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepytorch.bench.alternation import TurnGiver, alternate
from deepytorch.bench.processes import Program, last_lines, meeting_point, rank_environment
from deepytorch.config import process_environment

_LAST_LINES = 200  # of a log, in which the error is looked for


class ScriptFailed(Exception):
    """A process of a script failed; the error holds the end of its output."""


class Script:
    """One job in its own processes, with or without the import of deepytorch.

    Args:
        job: A dataclass, which the worker reads from a file.
        folder: For that file, and for what the ranks write.
        ranks: The number of processes.
        timeout_s: Seconds from now until `result` gives up.
        on: Whether deepytorch is imported for good, or does nothing.
        in_turns: Whether steps run only when `step` is called.
        worker: The module that each process runs.
        threads: Of each process; None leaves the choice to torch.
        environment: Further variables.
    """

    def __init__(
        self,
        job: Any,
        folder: Path,
        ranks: int,
        timeout_s: float,
        *,
        on: bool,
        in_turns: bool = False,
        worker: str = "deepytorch.bench.hosts_worker",
        threads: int | None = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._how = folder, "with the import" if on else "without the import"
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._turns = TurnGiver(ranks) if in_turns else None
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(job), default=str), encoding="utf-8")
        variables = {
            **process_environment(),
            "DEEPYTORCH": "on" if on else "off",
            **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
            "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        if ranks > 1:
            variables |= meeting_point()
        self.programs: list[Program] = []
        for rank in range(ranks):
            own = rank_environment(rank, ranks) if ranks > 1 else {}
            pipes = () if self._turns is None else self._turns.handed_over[rank]
            command = [sys.executable, "-m", worker, str(path), *map(str, pipes)]
            log = folder / f"rank{rank}.log"
            self.programs.append(Program(command, log, env=variables | own, pass_fds=pipes))
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
            for program in self.programs:
                program.process.wait(max(self._deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise self._late() from None
        for program in self.programs:
            if program.process.returncode:
                lines = last_lines(program.log, _LAST_LINES) or ["nothing"]
                said = next((line for line in reversed(lines) if "Error" in line), lines[-1])
                raise ScriptFailed(f"failed {self._how}: {said.strip()[:300]}")
        files = [self._folder / f"rank{rank}.json" for rank in range(len(self.programs))]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def end(self) -> None:
        """Kill all processes that still run."""
        for program in self.programs:
            program.end()
        if self._turns is not None:
            self._turns.close()

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
