"""`deepytorch bench compute`: steps of models of all kinds, in the ways that people run them and with the import.

Each way has a process of its own, since the import changes how a process keeps memory. The processes take turns, step
by step, once each has compiled what it runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import by_setup, shown, training_rows, whole_passes
from deepytorch.bench.jobs import TrainingJob, asked
from deepytorch.bench.options import Device, Mixed, ModelSize, Settle, check_choice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel
from deepytorch.bench.zoo import MODELS

EAGER, INDUCTOR, OURS = "eager", "inductor", "deepytorch"
SETUPS = (EAGER, INDUCTOR, "max-autotune", "recipe", OURS)
_MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptions:
    """Time training steps of networks for images, speech, text and diffusion, with the import and without.

    Each setup trains in a process of its own; they take turns, step by step, once each has compiled what it runs. The
    table says how many times as long as deepytorch's a step takes in eager and in Inductor, after how many seconds of
    training more steps are done than in eager, the most memory of the process, how far the first losses are from
    eager's, and which form of the model runs.
    """

    models: Annotated[tuple[str, ...], Option(help="Models of the zoo, with commas.")] = MODELS
    setups: Annotated[
        tuple[str, ...],
        Option(
            help="With commas: eager, inductor, max-autotune, recipe (Inductor, channels last and a fused optimizer), "
            "deepytorch.",
        ),
    ] = (EAGER, INDUCTOR, OURS)
    size: ModelSize = "cpu"
    precision: Mixed = "fp32"
    batch_size: Annotated[int, Option(min=0, help="Examples of a batch; 0: those of each model.")] = 0
    device: Device = "cpu"
    steps: Annotated[int, Option(min=1, help="Steps that are timed, in turns.")] = 20
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run with."""
        check_declared(self)
        check_choice(self, "models", MODELS)
        check_choice(self, "setups", SETUPS)


class Compute(Benchmark[ComputeOptions]):
    """See this module."""

    name = "compute"
    options = ComputeOptions

    def cells(self, options: ComputeOptions) -> Sequence[Cell]:
        """Return a cell for each model."""
        key = {"size": options.size, "precision": options.precision}
        return [
            Cell(
                key={"model": model, **key},
                setups=[self._setup(options, model, name) for name in options.setups],
                place=Place(threads=None),
            )
            for model in options.models
        ]

    @staticmethod
    def _setup(options: ComputeOptions, model: str, name: str) -> Setup:
        job = TrainingJob(
            model=model,
            **asked(options),
            parallel=Parallel(precision=options.precision),
            steps=whole_passes(options.steps, 4),
            warm_up=8,
        )
        if name == "recipe":
            job = replace(job, channels_last=True, fused=True)
        if name not in (EAGER, OURS):
            mode = _MAX_AUTOTUNE if name == "max-autotune" else None
            job = replace(job, parallel=replace(job.parallel, compile=INDUCTOR, mode=mode))
        return Setup(name=name, job=job, imports=name == OURS)

    def rows(self, options: ComputeOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup. ratio: its time over deepytorch's, the median over pairs of steps."""
        rows = []
        for row in training_rows(cell, found, EAGER):
            [run] = found[str(row.key["setup"])]
            figures = dict(row.figures)
            if OURS in found:
                pairs = zip(run["seconds"], found[OURS][0]["seconds"], strict=True)
                figures["ratio"] = statistics.median(own / ours for own, ours in pairs)
            if EAGER in found:
                ahead = break_even(run["warm_up"], run["seconds"], found[EAGER][0]["seconds"])
                figures |= {} if ahead is None else {"ahead_s": ahead}
            rows.append(replace(row, figures=figures))
        return rows

    def tables(self, results: Results) -> list[Table]:
        """Return one table, a line for each model."""
        rows, notes = [], []
        for together in results.together():
            model, measured = together[0].key["model"], by_setup(together)
            rows.append((str(model), *_line(measured, results.options["setups"])))
            for name, row in measured.items():
                if row.failed or "disturbed" in row.texts:
                    notes.append(f"{model}, {name}: {row.failed or row.texts['disturbed']}.")
        times = [f"{name}, ms" for name in results.options["setups"]]
        columns = ("model", *times, "of eager", "of Inductor", "ahead after, s", "memory of eager's", "losses", "runs")
        title = f"A training step, size {results.options['size']}, {results.options['precision']}"
        return [Table(title, columns, tuple(rows), ("model", "runs"), tuple(notes))]


def _line(measured: Mapping[str, Row], setups: Sequence[str]) -> Iterator[str]:
    for name in setups:
        yield shown(measured.get(name), "step_s", "{:,.1f}", 1e3)
    ours, eager = measured.get(OURS), measured.get(EAGER)
    for name in (EAGER, INDUCTOR):
        yield shown(measured.get(name), "ratio", "{:.2f}x")
    if ours is None or ours.failed:
        yield from ("", "", "", "" if ours is None else ours.failed)
        return
    yield shown(ours, "ahead_s", "{:,.0f}", none="never")
    yield "" if eager is None or eager.failed else shown(ours, "process_mb", "{:.2f}", 1 / eager.figures["process_mb"])
    yield shown(ours, "loss_rel_diff", "{:.0e}")
    yield ours.texts.get("runs", "")


def break_even(warm_up: Sequence[float], settled: Sequence[float], eager: Sequence[float]) -> float | None:
    """Return the seconds of training after which more steps are done than in eager; None if that never comes.

    warm_up: seconds of each step until the way to run the model was settled. settled, eager: of steps from then on.
    """
    theirs, ours = statistics.median(eager), statistics.median(settled)
    passed = lost = made_up = 0.0
    for seconds in warm_up:
        was_behind = lost > 0.0
        passed, lost = passed + seconds, lost + seconds - theirs
        if was_behind and lost <= 0.0:
            made_up = passed
    if lost <= 0.0:
        return made_up
    return passed + lost / (theirs - ours) * ours if ours < theirs else None
