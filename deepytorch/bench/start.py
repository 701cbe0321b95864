"""`deepytorch bench start`: how soon a run trains, and whether it is behind eager at any point.

One script runs in its own processes: in eager, with the import from empty caches ("cold"), and once more from the
caches that the previous run has filled ("warm"). The result is the time since the process began at which each step was
over. Cold runs wait after the last of these steps until everything that is compiled in the background is stored.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepytorch.bench.options import check_at_least
from deepytorch.bench.processes import Program, last_lines, meeting_point, rank_environment
from deepytorch.bench.results import machine
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError, ScriptError

EAGER, COLD, WARM = "eager", "cold", "warm"
ARMS = (EAGER, COLD, WARM)
_IMPORTS = {EAGER: "", COLD: "fill", WARM: "import"}  # see start_worker
_REST_SECONDS = 2.0  # after a run: its child processes end within a second, and must not disturb the next run
_CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_WORKER = Path(__file__).with_name("start_worker.py")
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """The options of `deepytorch bench start`.

    command: a script and its arguments; empty: a built-in model. ranks: processes of the script, on this host. threads:
    of each; None leaves them unchanged.
    """

    command: tuple[str, ...] = ()
    steps: int = 120
    rounds: int = 3
    ranks: int = 1
    threads: int | None = None
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_at_least(self, 1, "steps", "rounds", "ranks")
        if self.command and not Path(self.command[0]).is_file():
            raise ConfigError(f"The script {self.command[0]} is not there; expected the path of a Python file.")

    @property
    def script(self) -> tuple[str, ...]:
        """Return the script that is run, with its arguments."""
        return self.command or (str(Path(__file__).with_name("start_script.py")),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way of running the script. Seconds are since the process began, medians over the rounds.

    steps: when each step was over. first_packed: when the first step without padding was over. compiles: of the last
    round. change_over: when compiled code began to run; None: never, or at the first call.
    """

    name: str
    steps: tuple[float, ...]
    first_packed: float | None = None
    compiles: int = 0
    change_over: float | None = None

    def ratios(self, eager: Arm) -> list[float]:
        """Return, for each step, the time until its end divided by eager's time."""
        return [mine / theirs for mine, theirs in zip(self.steps, eager.steps, strict=False)]

    def ahead_from(self, eager: Arm) -> int | None:
        """Return the step (from 1) from which on the arm is never behind eager; None if it is behind at the end."""
        behind = [number for number, ratio in enumerate(self.ratios(eager), 1) if ratio > 1.0]
        last = max(behind, default=0)
        return None if last == len(self.steps) else last + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StartResult:
    """The result of `deepytorch bench start`."""

    options: StartOptions
    machine: str
    torch: str
    arms: tuple[Arm, ...]

    @property
    def eager(self) -> Arm:
        """Return the arm that the others are compared with."""
        return self.arms[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain data. worst: the largest of `Arm.ratios`."""
        options = asdict(self.options) | {"command": [Path(self.options.script[0]).name, *self.options.command[1:]]}
        arms = [
            asdict(arm)
            | {
                "worst": max(arm.ratios(self.eager)),
                "ahead_from": arm.ahead_from(self.eager),
                "first_step_later": arm.steps[0] - self.eager.steps[0],
            }
            for arm in self.arms
        ]
        return {"options": options, "machine": self.machine, "torch": self.torch, "arms": arms}


def run_start(options: StartOptions, notify: Callable[[str], None] = lambda _: None) -> StartResult:
    """Run every arm `rounds` times, in turns. Raises `ScriptError` if the script fails or is not over in time."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    notify("Once in eager, which is not counted: files are read from the disk")
    with tempfile.TemporaryDirectory(prefix="deepytorch-bench-") as scratch:
        _run(options, EAGER, Path(scratch), steps=2)
    for number in range(options.rounds):
        # The warm run reads the caches that the cold one has filled.
        with tempfile.TemporaryDirectory(prefix="deepytorch-bench-") as scratch:
            for name in ARMS:
                notify(f"Round {number + 1} of {options.rounds}: {name}")
                found[name].append(_run(options, name, Path(scratch), options.steps))
    return StartResult(
        options=options,
        machine=machine(),
        torch=torch.__version__,
        arms=tuple(_arm(name, runs) for name, runs in found.items()),
    )


def _arm(name: str, runs: list[dict[str, Any]]) -> Arm:
    steps = [statistics.median(each) for each in zip(*(run["seconds"] for run in runs), strict=False)]
    packed = [run["first_packed"] for run in runs if run["first_packed"] is not None]
    report = runs[-1]["report"]
    return Arm(
        name=name,
        steps=tuple(steps),
        first_packed=statistics.median(packed) if packed else None,
        compiles=report.get("compiles", 0),
        change_over=report.get("change_over_seconds"),
    )


def _run(options: StartOptions, name: str, scratch: Path, steps: int) -> dict[str, Any]:
    """Run the script once; return the record of its rank 0."""
    environment = dict(process_environment())
    environment["DEEPYTORCH"] = "off" if name == EAGER else "on"
    environment["DEEPYTORCH_COMPILE"] = "background"  # unlike other benchmarks, which wait for compilation
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for variable in _CACHES:
        folder = scratch / variable.lower()
        folder.mkdir(mode=0o700, exist_ok=True)
        environment[variable] = str(folder)
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if options.ranks > 1:
        environment |= meeting_point()
        environment.setdefault("OMP_NUM_THREADS", "1")
    record = scratch / f"{name}.json"
    programs: list[Program] = []
    try:
        for rank in range(options.ranks):
            own = rank_environment(rank, options.ranks) if options.ranks > 1 else {}
            file = record if rank == 0 else f"{record}.{rank}"
            command = [sys.executable, str(_WORKER), str(file), str(steps), _IMPORTS[name], *options.script]
            programs.append(Program(command, scratch / f"rank{rank}.log", env=environment | own))
        _wait(programs, options, name)
    finally:
        for program in programs:
            program.end()
        time.sleep(_REST_SECONDS)
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    if not found["seconds"]:
        raise ScriptError(f"{options.script[0]} made no step of an optimizer of torch.optim; expected one that trains.")
    return found


def _wait(programs: list[Program], options: StartOptions, name: str) -> None:
    deadline = time.monotonic() + options.timeout_s
    what = f"{options.script[0]} ({name})"
    while True:
        if programs[0].process.poll() == 0:
            return  # rank 0 has written its record; other ranks, still in their last step, fail without it
        for program in programs:
            if program.process.poll():
                said = "\n".join(last_lines(program.log, _LAST_LINES))
                raise ScriptError(f"{what} ended with {program.process.returncode}. Its last lines:\n{said}")
        if time.monotonic() > deadline:
            raise ScriptError(f"{what} was not over in {options.timeout_s:g} seconds; --timeout gives it more.")
        time.sleep(0.05)
