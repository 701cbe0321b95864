"""Runs a script with the import and without, each in a process of its own, and compares the numbers it records."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
TOLERANCE = 1e-4  # relative
MOVES = 3  # how often eager is run from moved weights where something differs: one run can be close to eager by chance
FLOOR = 1e-2  # numbers smaller than this one are compared as if they were this large


@dataclass(frozen=True)
class Scenario:
    """A script, or one of its cases, and what it says of itself: in constants of its module, or arguments of `@case`.

    DEFAULT: whether it belongs to the default suite. RANKS: how many processes it needs. LOWERING: how its graphs run.
    PRECISION: what it computes in, which says how far the last bit of a weight is. EXPECT: "packed" where all steps but
    the first have to run without pads, "padded" where one of them must not.
    """

    path: Path
    default: bool = False
    ranks: int = 1
    lowering: str = "aot_eager"
    precision: str = "float32"
    expect: str | None = None
    case: str | None = None

    @property
    def name(self) -> str:
        """The function that the case is, or the file without its ending."""
        return self.case or self.path.stem

    @classmethod
    def read(cls, path: Path) -> list[Scenario]:
        """Read the scenarios of this script, which is not run: its cases, or itself where it has none."""
        lines = ast.parse(path.read_text()).body
        said = {
            target.id.lower(): ast.literal_eval(line.value)
            for line in lines
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name) and target.id in ("DEFAULT", "RANKS", "LOWERING", "PRECISION", "EXPECT")
        }
        cases = [
            cls(path, **{**said, **constants, "case": line.name})
            for line in lines
            if isinstance(line, ast.FunctionDef)
            for decorator in line.decorator_list
            if (constants := _constants_of_case(decorator)) is not None
        ]
        return cases or [cls(path, **said)]


def _constants_of_case(decorator: ast.expr) -> dict[str, Any] | None:
    """The arguments of `@case` or `@case(...)`; None for another decorator."""
    called = isinstance(decorator, ast.Call)
    name = decorator.func if called else decorator
    if not (isinstance(name, ast.Name) and name.id == "case"):
        return None
    return {each.arg: ast.literal_eval(each.value) for each in decorator.keywords if each.arg} if called else {}


@dataclass(frozen=True)
class Outcome:
    """What a script recorded in one variant, over all of its ranks.

    history: one list of numbers an entry. raised: the exception that ended it, one a rank; `error` has the traceback.
    log: what it wrote to stdout and stderr. report: of the first rank, where deepytorch was imported.
    """

    history: list[list[float]]
    raised: list[str | None]
    error: str
    log: str
    seconds: float
    report: dict[str, Any] | None


class Runner:
    """A process that forks children, see `fork_server`."""

    def __init__(self) -> None:
        """Starts it, which takes some seconds."""
        self._server = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer(server)
        return server

    def run(
        self, scenario: Scenario, variant: str, folder: Path, deadline_s: float = DEADLINE_S, times: int = 1
    ) -> Outcome:
        """Run it as "off", "import" (compiled at once), "default" (beside, by Inductor) or "moved-N" (off, and
        weights moved in their last bit); files go to `folder`. times: as often its usual steps, of a script that can.

        Raises `TimeoutError` where it did not end by the deadline, `ChildProcessError` where it died.
        """
        if self._server.poll() is not None:  # one scenario has lost it, not those that follow
            self._server = self._start()
        folder = folder / variant
        folder.mkdir()
        request = {
            "script": str(scenario.path),
            "case": scenario.case,
            "variant": variant,
            "folder": str(folder),
            "ranks": scenario.ranks,
            "lowering": scenario.lowering,
            "precision": scenario.precision,
            "deadline_s": deadline_s,
            "times": times,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._answer(self._server)
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(scenario.ranks)]
        log = "\n".join(logs)
        if None in answer["status"]:
            raise TimeoutError(f"{scenario.name} ({variant}) was killed after {deadline_s:g} s\n{log}")
        if any(answer["status"]):
            raise ChildProcessError(f"{scenario.name} ({variant}) ended with {answer['status']}\n{log}")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(scenario.ranks)]
        return Outcome(
            history=[entry for each in found for entry in each["history"]],
            raised=[each["raised"] for each in found],
            error="\n".join(each["error"] for each in found if each["error"]),
            log=log,
            seconds=answer["seconds"],
            report=found[0]["report"],
        )

    def close(self) -> None:
        """End it."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    @staticmethod
    def _answer(server: subprocess.Popen[str]) -> dict[str, Any]:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise ChildProcessError(f"the fork server ended with status {server.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(
    scenario: Scenario,
    runner: Runner,
    folder: Path,
    variant: str = "import",
    deadline_s: float = DEADLINE_S,
    times: int = 1,
) -> tuple[list[str], Outcome]:
    """What the import changes in what this scenario records or raises, one line each; the outcome with it."""
    reference = runner.run(scenario, "off", folder, times=times)
    imported = runner.run(scenario, variant, folder, deadline_s, times)
    found = differences(reference, imported)
    if found and shape(reference) == shape(imported):
        moved = [runner.run(scenario, f"moved-{number}", folder, times=times) for number in range(MOVES)]
        found = differences(reference, imported, moved)
    if imported.log.count("Traceback") > reference.log.count("Traceback"):
        found.append("a traceback in the log")
    return found, imported


def differences(reference: Outcome, found: Outcome, moved: Sequence[Outcome] = ()) -> list[str]:
    """Where `found` is not what `reference` is, beyond the tolerance: at least ten times what `moved` differ."""
    if reference.raised != found.raised:
        return [f"raised {found.raised}, without the import {reference.raised}"]
    if shape(reference) != shape(found):
        return [f"recorded {shape(found)} numbers, without the import {shape(reference)}"]
    moved = [each for each in moved if shape(each) == shape(reference)]
    told = []
    for index, entry in enumerate(reference.history):
        for place, (expected, got) in enumerate(zip(entry, found.history[index], strict=True)):
            noise = [_apart(expected, each.history[index][place]) for each in moved]
            tolerance = max([TOLERANCE, *(10 * each for each in noise if math.isfinite(each))])
            if not _apart(expected, got) <= tolerance:
                told.append(
                    f"entry {index}, number {place}: {got:.7g}, without the import {expected:.7g} "
                    f"({_apart(expected, got):.1e} apart, tolerance {tolerance:.1e})"
                )
    return told


def shape(outcome: Outcome) -> list[int]:
    """How many numbers each entry has."""
    return [len(entry) for entry in outcome.history]


def _apart(expected: float, found: float) -> float:
    """The relative distance of two numbers; infinite where only one of them is a finite one."""
    if expected == found or (math.isnan(expected) and math.isnan(found)):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(expected - found) / max(abs(expected), FLOOR)
