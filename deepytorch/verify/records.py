"""The jobs and records of `deepytorch verify`'s processes: JSON, one record a line, and raw weights.

A line is written as soon as it is known, so that the records of a script that dies can be read up to that point.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from deepytorch.bench.results import decoded
from deepytorch.compiler.config import LOWERINGS
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3")
WITHOUT, WITH, MOVED = "without", "with", "moved"  # MOVED: without the import, weights moved by their last bit


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Run your training script with `import deepytorch` and without it; compare losses, gradients and weights.

    Each run is a process of its own with the same seeds. A third run, without the import and with every weight moved by
    its last bit, shows how much rounding alone changes. Exits with 1 if something differs or the script fails only with
    the import, with 2 if it fails without it.
    """

    command: Annotated[
        tuple[str, ...],
        Argument(metavar="SCRIPT [ARGS]", help="Your training script, unchanged, and its arguments."),
    ]
    is_module: Annotated[bool, Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False
    steps: Annotated[
        int, Option(min=1, help="End the script after so many optimizer steps, all of its optimizers together.")
    ] = 10
    seed: Annotated[int, Option(min=0, help="Seed of random, numpy and torch, set before the script starts.")] = 0
    tolerance: Annotated[
        float,
        Option(help="Relative difference that is always allowed. Ten times what rounding alone causes is allowed too."),
    ] = 1e-4
    timeout_s: Annotated[
        float, Option("--timeout", metavar="SECONDS", help="Time limit of each of the three runs.")
    ] = 1800.0
    lowering: Annotated[
        str | None,
        Option(
            metavar="|".join(LOWERINGS),
            help="What runs the compiled graphs: inductor; aot_eager, without Inductor; eager, without AOTAutograd "
            "either: the last two for debugging. Default: inductor.",
        ),
    ] = None
    dropout: Annotated[
        bool,
        Option(" /--no-dropout", show_default=False, help="Set every dropout probability to zero, in all three runs."),
    ] = True

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no script was given; expected: deepytorch verify SCRIPT [ARGUMENTS]")
        for name in ("steps", "tolerance", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected more than 0")
        if self.lowering not in (None, *LOWERINGS):
            raise ConfigError(f"lowering={self.lowering!r}; expected one of {', '.join(LOWERINGS)}")
        ranks = process_environment().get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ConfigError(
                f"WORLD_SIZE={ranks} is set, so this is one of several ranks; expected one process: run `deepytorch "
                "verify SCRIPT` without torchrun"
            )
        if not self.is_module and not Path(self.command[0]).exists():
            hint = "the script itself" if Path(self.command[0]).name in _LAUNCHERS else "a path to a Python script"
            raise ConfigError(
                f"the script {self.command[0]!r} does not exist; expected {hint}: deepytorch verify SCRIPT [ARGUMENTS] "
                "or deepytorch verify -m MODULE [ARGUMENTS]"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job of one process. role: WITHOUT, WITH or MOVED. folder: for its records."""

    options: VerifyOptions
    role: str
    folder: Path

    def write(self, path: Path) -> None:
        """Save the job for the process."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Load the job in the process."""
        return decoded(cls, json.loads(path.read_text(encoding="utf-8")))

    @property
    def records(self) -> Path:
        """Return the file of the records."""
        return self.folder / "records.jsonl"

    @property
    def weights(self) -> Path:
        """Return the file of the trained weights at the end, one after another."""
        return self.folder / "weights.bin"

    @property
    def ended(self) -> Path:
        """Return the file that appears once everything is written: a process that hangs afterwards has lost nothing."""
        return self.folder / "ended"


@dataclass(frozen=True, slots=True)
class Loss:
    """One scalar that was handed to backward."""

    value: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """Norms before a step of an optimizer: of all gradients, and of each parameter's gradient (None: no gradient)."""

    optimizer: int
    total: float
    norms: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A trained weight's place in the file: numbers of `dtype` ("float32" or "float64"), from `offset` in bytes."""

    name: str
    dtype: str
    count: int
    offset: int


@dataclass
class Run:
    """One run of the script, as far as it came.

    events: by step, in their order; steps count from 1, and later events belong to a step that was never made. names:
    of the trained parameters, by optimizer. packed: by step, the regions' counts of packed and padded steps so far.
    """

    role: str
    steps: int = 0
    backwards: int = 0
    optimizers: int = 0
    events: dict[int, list[Loss | Gradients]] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    weights_file: Path | None = None
    weights_missing: str | None = None
    packed: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    dropouts: int = 0
    ended: str | None = None  # "steps": all were made, "script": the script ended before, None: neither
    failure: str | None = None
    output: str = ""  # the last lines of a run that failed

    def losses(self) -> list[float]:
        """Return every loss, in order."""
        return [event.value for _, events in sorted(self.events.items()) for event in events if isinstance(event, Loss)]


def read_run(job: Job) -> Run:
    """Return the run that a process has recorded; an unfinished line is left out."""
    run = Run(job.role)
    lines = job.records.read_text(encoding="utf-8").split("\n") if job.records.exists() else []
    for line in lines[:-1]:
        _take(run, json.loads(line))
    if run.weights:
        run.weights_file = job.weights
    return run


def _take(run: Run, record: dict[str, Any]) -> None:
    kind = record["kind"]
    if kind == "optimizer":
        run.optimizers += 1
        run.dropouts += record["dropouts"]
    elif kind == "names":
        run.names[record["optimizer"]] = record["names"]
    elif kind == "backward":
        run.backwards += 1
        run.events.setdefault(record["step"], []).extend(Loss(value) for value in record["values"])
    elif kind == "gradients":
        found = Gradients(record["optimizer"], record["total"], tuple(record["norms"]))
        run.events.setdefault(record["step"], []).append(found)
    elif kind == "step":
        run.steps = record["step"]
        run.packed[run.steps] = [(name, packed, padded) for name, packed, padded in record["regions"]]
    elif kind == "draws":
        run.draws = record["modules"]
    elif kind == "weights":
        run.weights = [Weight(**each) for each in record["weights"]]
        run.weights_missing = record["missing"]
    elif kind == "report":
        run.report = record["report"]
    elif kind == "ended":
        run.ended, run.failure = record["how"], record["failure"]
