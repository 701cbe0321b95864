"""`deepytorch bench start`: how soon a run trains, and whether it is behind eager at any point.

One script runs in its own processes: in eager, with the import from empty caches ("cold"), and once more from the
caches that the previous run has filled ("warm"). The result is the time since the process began at which each step was
over. Cold runs wait after the last of these steps until everything that is compiled in the background is stored. Runs
take turns as a whole, since what is measured is how they begin.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import shown
from deepytorch.bench.launch import Ranks, scratch
from deepytorch.bench.options import check_at_least
from deepytorch.bench.plots import Plot, Points
from deepytorch.bench.results import Results, Row
from deepytorch.bench.run import words_of
from deepytorch.bench.table import Table
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError, ScriptError

EAGER, COLD, WARM = "eager", "cold", "warm"
_IMPORTS = {EAGER: "", COLD: "fill", WARM: "import"}  # see start_worker
_REST_SECONDS = 2.0  # after a run: its child processes end within a second, and must not disturb the next run
_CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_WORKER, _ROOT = Path(__file__).with_name("start_worker.py"), Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """Time a script from its process's first moment on: in eager, with the import, and with it a second time.

    Says how much later the first step is over, by how much the run was behind eager at most, and from which step on it
    is ahead. Cold runs begin with empty caches, and wait at their end until these are filled; warm ones begin with what
    they have left. --timeout is the time limit of one run.
    """

    command: Annotated[
        tuple[str, ...],
        Argument(metavar="[SCRIPT [ARGS]]", help="Your training script. Default: a small Llama on random rows."),
    ] = ()
    steps: Annotated[int, Option(min=1, help="Optimizer steps of each run.")] = 120
    rounds: Annotated[int, Option(min=1, help="How often each is run.")] = 3
    ranks: Annotated[int, Option(min=1, help="Processes of the script, which finds RANK and the like set.")] = 1
    threads: Annotated[
        int | None, Option(min=1, help="Threads of each process (OMP_NUM_THREADS). Default: as they are.")
    ] = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_at_least(self, 1, "steps", "rounds", "ranks")
        if self.command and not Path(self.command[0]).is_file():
            raise ConfigError(f"The script {self.command[0]} is not there; expected the path of a Python file.")

    @property
    def script(self) -> tuple[str, ...]:
        """Return the script that is run, with its arguments."""
        return self.command or (str(Path(__file__).with_name("start_script.py")),)


class Start(Benchmark[StartOptions]):
    """See this module."""

    name = "start"
    options = StartOptions

    def cells(self, options: StartOptions) -> Sequence[Cell]:
        """Return the one cell."""
        key: dict[str, str | int | None] = {
            "script": Path(options.script[0]).name,
            "ranks": options.ranks,
            "threads": options.threads,
        }
        return [Cell(key=key, setups=[Setup(name=name, job=None) for name in _IMPORTS], place=Place())]

    def measure(
        self, options: StartOptions, cell: Cell, timeout_s: float, notify: Callable[[str], None]
    ) -> dict[str, list[dict[str, Any]]]:
        """Run the script `rounds` times in each way, and return the records of rank 0 by round.

        Raises `RankError` if the script fails or is not over in time, `ScriptError` if it trains nothing.
        """
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in _IMPORTS}
        notify("once in eager, which is not counted: files are read from the disk")
        with scratch() as folder:
            _run(options, EAGER, folder, 2, timeout_s)
        for number in range(options.rounds):
            with scratch() as folder:  # the warm run reads the caches that the cold one has filled
                for name, records in found.items():
                    notify(f"round {number + 1} of {options.rounds}: {name}")
                    records.append(_run(options, name, folder, options.steps, timeout_s))
        return found

    def rows(self, options: StartOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup. Seconds are since the process began, medians over the rounds.

        Series: `over_s`, when each step was over. Figures: `first_s`, `last_s`, of the first and the last step;
        `first_packed_s`, of the first without padding; `compiled_from_s`, when compiled code began to run, and
        `compiles`, both of the last round; and as `compared` gives them.
        """
        over = {
            name: [statistics.median(each) for each in zip(*(run["seconds"] for run in runs), strict=False)]
            for name, runs in found.items()
        }
        rows = []
        for name, runs in found.items():
            packed = [run["first_packed"] for run in runs if run["first_packed"] is not None]
            report = runs[-1]["report"]
            figures = {"first_s": over[name][0], "last_s": over[name][-1], "compiles": report.get("compiles", 0)}
            figures |= {"first_packed_s": statistics.median(packed)} if packed else {}
            change_over = report.get("change_over_seconds")
            figures |= {} if change_over is None else {"compiled_from_s": change_over}
            figures |= {} if name == EAGER else compared(over[name], over[EAGER])
            rows.append(Row(key={**cell.key, "setup": name}, figures=figures, series={"over_s": over[name]}))
        return rows

    def tables(self, results: Results) -> list[Table]:
        """Return one table."""
        rows = results.rows
        where = words_of({name: value for name, value in rows[0].key.items() if name != "setup"}) if rows else ""
        rounds, steps = (results.options[name] for name in ("rounds", "steps"))
        seconds = ("first step", "first packed", "compiled from", f"step {steps}")
        return [
            Table(
                title=f"{where}: seconds since the process began, medians of {rounds}",
                columns=("", *seconds, "at most behind", "ahead from step", "compiles"),
                rows=tuple(_shown(row) for row in rows),
                left=("",),
            )
        ]

    def plots(self, results: Results) -> list[Plot]:
        """Return how far each run has come over time."""
        curves = [
            Points(str(row.key["setup"]), tuple(seconds), tuple(range(1, len(seconds) + 1)))
            for row in results.rows
            if (seconds := row.series.get("over_s"))
        ]
        title = "Steps that are over"
        return [Plot(title, "curves", "seconds since the process began", "steps", tuple(curves))] if curves else []


def compared(over: Sequence[float], eager: Sequence[float]) -> dict[str, float]:
    """Return figures of a run beside eager's, from the seconds after which each step was over.

    `least_ratio`: eager's seconds over this run's, at the step where that is least: under 1 it was behind there.
    `ahead_from_step`: the step (from 1) from which on it is never behind; missing if it is behind at the end.
    """
    ratios = [theirs / own for own, theirs in zip(over, eager, strict=False)]
    last = max((number for number, ratio in enumerate(ratios, 1) if ratio < 1.0), default=0)
    return {"least_ratio": min(ratios)} | ({} if last == len(ratios) else {"ahead_from_step": last + 1})


def _shown(row: Row) -> tuple[str, ...]:
    name = str(row.key["setup"])
    marks = ("first_s", "first_packed_s", "compiled_from_s", "last_s")
    seconds = [shown(row, mark, "{:.1f}", none="-") for mark in marks]
    if name == EAGER:
        return (name, *seconds, "", "", "")
    behind = f"{1 / row.figures['least_ratio']:.2f}x" if "least_ratio" in row.figures else row.failed
    return (name, *seconds, behind, *(shown(row, each, "{:.0f}", none="-") for each in ("ahead_from_step", "compiles")))


def _run(options: StartOptions, name: str, folder: Path, steps: int, timeout_s: float) -> dict[str, Any]:
    """Run the script once; return the record of its rank 0."""
    known, script = process_environment(), options.script
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), known.get("PYTHONPATH")]))}
    for variable in _CACHES:
        (folder / variable.lower()).mkdir(mode=0o700, exist_ok=True)
        environment[variable] = str(folder / variable.lower())
    shares_cores = options.ranks > 1 and "OMP_NUM_THREADS" not in known
    place = Place(ranks=options.ranks, threads=options.threads or (1 if shares_cores else None))
    called = f"{Path(script[0]).name} ({name})"
    setup = Setup(name=called, job=None, imports=name != EAGER, environment=environment)
    ranks = Ranks(setup, place, folder, timeout_s, command=(sys.executable, str(_WORKER)))
    try:
        ranks.give("start", {"steps": steps, "imports": _IMPORTS[name], "script": script}, lambda text: None)
        found = ranks.found()[0]
    finally:
        ranks.end()
        time.sleep(_REST_SECONDS)
    if not found["seconds"]:
        raise ScriptError(f"{script[0]} made no step of an optimizer of torch.optim; expected one that trains.")
    return found
