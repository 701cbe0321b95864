"""`deepytorch bench epoch`: real tokens per second over an epoch, relative to a good user's baseline: sorted lengths.

Padding can also be avoided by the order of the rows: Trainer's `group_by_length` puts rows of similar lengths into a
batch. That changes the batches of a step (they are no longer drawn at random), so it is no speed-up of the same
training; it is the baseline that a user would name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import loss_rel_diff, mean_step_s, shown, training_rows
from deepytorch.bench.jobs import TrainingJob, asked
from deepytorch.bench.options import Device, Mixed, ModelSize, Settle, TextFile, check_choice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel

MODELS = ("llama", "llama2_13b", "qwen2_14b", "llama_65b")  # those of the zoo that learn from rows of uneven lengths
BASELINE = "inductor+grouped"
SETUPS = (BASELINE, "inductor+random", "deepytorch+random", "deepytorch+grouped")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOptions:
    """Time training over an epoch, rows in random order and grouped by length as Trainer's group_by_length does.

    Each setup trains its own model with AdamW, in a process of its own, on the same rows; what counts is real tokens a
    second, without padding. Trainer sorts the rows of 50 batches at a time; fewer batches are sorted as a whole.
    """

    models: Annotated[tuple[str, ...], Option(help=f"Of {', '.join(MODELS)}, with commas.")] = ("llama",)
    setups: Annotated[tuple[str, ...], Option(help="Compiler and order of rows, with commas.")] = SETUPS
    size: ModelSize = "cpu"
    data: TextFile = None
    batch_size: Annotated[int, Option(min=0, help="Rows in a batch; 0: those of each model.")] = 0
    batches: Annotated[int, Option(min=2, help="Batches of the epoch.")] = 32
    rounds: Annotated[int, Option(min=1, help="How often each batch is timed in each setup.")] = 3
    precision: Mixed = "fp32"
    device: Device = "cpu"
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run with."""
        check_declared(self)
        check_choice(self, "models", MODELS)
        check_choice(self, "setups", SETUPS)


class Epoch(Benchmark[EpochOptions]):
    """See this module."""

    name = "epoch"
    options = EpochOptions

    def cells(self, options: EpochOptions) -> Sequence[Cell]:
        """Return a cell for each model."""
        key = {name: getattr(options, name) for name in ("size", "batch_size", "precision")}
        return [
            Cell(
                key={"model": model, **key},
                setups=[_setup(options, model, name) for name in options.setups],
                place=Place(threads=None),
            )
            for model in options.models
        ]

    def rows(self, options: EpochOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup.

        `tokens_per_s`, without pads: of all batches, each at the median of the rounds. `speedup`: over the baseline's.
        `real_token_fraction` of the positions. `loss_rel_diff`: of the first losses, from Inductor's on the same
        batches. Else as `training_rows`.
        """
        rows = []
        for row in training_rows(cell, found, ""):
            name = str(row.key["setup"])
            [run] = found[name]
            figures = {**row.figures, "real_token_fraction": run["tokens"] / run["positions"]}
            if BASELINE in found:
                baseline = found[BASELINE][0]["tokens"] / mean_step_s(found[BASELINE])
                figures["speedup"] = figures["tokens_per_s"] / baseline
            stock = name.replace("deepytorch", "inductor")
            if stock in found and stock != name:
                figures["loss_rel_diff"] = loss_rel_diff(found[stock], [run])
            rows.append(replace(row, figures=figures))
        return rows

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each model."""
        return [_table(rows, results.options) for rows in results.together()]


def _setup(options: EpochOptions, model: str, name: str) -> Setup:
    compiler, _, order = name.partition("+")
    stock = compiler == "inductor"
    job = TrainingJob(
        model=model,
        **asked(options),
        parallel=Parallel(precision=options.precision, compile=compiler if stock else ""),
        optimizer="adamw",
        data=order,
        steps=options.batches * options.rounds,
        warm_up=options.batches,  # every shape: what compiles comes first and is not timed
    )
    return Setup(name=name, job=job, imports=not stock)


def _table(measured: Sequence[Row], options: Mapping[str, Any]) -> Table:
    rows = []
    for row in measured:
        compiler, _, order = str(row.key["setup"]).partition("+")
        rows.append(
            (
                compiler,
                order,
                shown(row, "tokens_per_s", "{:,.0f}"),
                shown(row, "speedup", "{:.2f}x"),
                shown(row, "real_token_fraction", "{:.0f} %", 100),
                row.failed or row.texts.get("disturbed", "") or row.texts.get("runs", ""),
            )
        )
    key = measured[0].key
    title = (
        f"{key['model']}, {key['size']}, {key['precision']}, {options['device']}: an epoch of {options['batches']} "
        f"batches, each timed {options['rounds']} times"
    )
    words = ("compiled by", "rows", "runs")
    return Table(title, (*words[:2], "real tokens/s", "ratio", "real tokens", "runs"), tuple(rows), words)
