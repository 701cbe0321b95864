"""`deepytorch bench sharded`: step times and losses of FSDP2, with values rounded between hosts and exact."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import place_in_words, training_rows
from deepytorch.bench.jobs import TrainingJob
from deepytorch.bench.options import (
    LabRate,
    NumHosts,
    RanksOfHost,
    TextFile,
    TextSize,
    check_at_least,
    check_choice,
    check_declared,
    check_hosts,
)
from deepytorch.bench.plots import Plot, Points
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel

UNTIMED = 2  # first steps, which allocate buffers
LAST_LOSSES = 10  # steps over which the loss at the end is averaged
STOCK = "gloo"
WIRES = ("int8", "fp8")
SETUPS = (STOCK, "exact", *WIRES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOptions:
    """Train a sharded Llama (FSDP2) with weights and gradients rounded between hosts; compare step time and losses.

    Each setup trains in processes of its own, in eager; they take turns, step by step, on the same batches. Hosts are
    simulated on this machine, which needs root: see deepytorch lab.
    """

    size: TextSize = "demo"
    batch_size: Annotated[int, Option(min=1, help="Rows in a batch of each rank.")] = 2
    setups: Annotated[
        tuple[str, ...],
        Option(
            help="What to compare, with commas. gloo: the stock process group. exact: deepytorch's, values as they "
            "are. int8, fp8: deepytorch's, values rounded to 8 bits between hosts. The first is what the others are "
            "compared with.",
        ),
    ] = ("exact", "int8")
    data: TextFile = None
    ranks: RanksOfHost = 2
    hosts: NumHosts = 2
    rate: LabRate = "200mbit"
    steps: Annotated[int, Option(min=UNTIMED + 1, help="Training steps of each.")] = 100

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "setups", SETUPS)
        check_at_least(self, 2, "hosts")
        check_hosts(self)


class Sharded(Benchmark[ShardedOptions]):
    """See this module."""

    name = "sharded"
    options = ShardedOptions

    def cells(self, options: ShardedOptions) -> Sequence[Cell]:
        """Return one cell."""
        place = Place.of(options.hosts, options.ranks, options.rate)
        job = TrainingJob(
            model="llama",
            size=options.size,
            rows=options.batch_size,
            parallel=Parallel(sharding="fsdp2"),
            optimizer="adamw",
            lr=1e-3,
            file=options.data,
            batches=options.steps,
            steps=options.steps - UNTIMED,
            warm_up=UNTIMED,
            losses=options.steps,
            compiles=False,
        )
        changes: dict[str, dict[str, Any]] = {
            STOCK: {"stock_group": True},
            **{wire: {"quantize": wire} for wire in WIRES},
        }
        return [
            Cell(
                key={
                    "model": "llama",
                    "size": options.size,
                    "batch size": options.batch_size,
                    **place.key,
                },
                setups=[
                    Setup(name=name, job=replace(job, **changes.get(name, {})), imports=True) for name in options.setups
                ],
                place=place,
            )
        ]

    def rows(self, options: ShardedOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup, with the losses of all steps, means over the ranks, and `last_loss`."""
        rows = []
        for row in training_rows(cell, found, options.setups[0]):
            ranks = found[str(row.key["setup"])]
            losses = [statistics.fmean(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
            figures = {**row.figures, "last_loss": statistics.fmean(losses[-LAST_LOSSES:])}
            rows.append(replace(row, figures=figures, series={"losses": losses}))
        return rows

    def tables(self, results: Results) -> list[Table]:
        """Return a table of step times and losses."""
        return [_table(rows, results.options) for rows in results.together()]

    def plots(self, results: Results) -> list[Plot]:
        """Return the losses over the steps."""
        curves = [
            Points(str(row.key["setup"]), tuple(map(float, range(1, len(losses) + 1))), tuple(losses))
            for row in results.rows
            if (losses := row.series.get("losses"))
        ]
        return [Plot("FSDP2, values rounded between hosts", "curves", "step", "loss", tuple(curves))] if curves else []


def _table(measured: Sequence[Row], options: Mapping[str, Any]) -> Table:
    baseline = options["setups"][0]
    expected = [row.figures["last_loss"] for row in measured if row.key["setup"] == baseline and not row.failed]
    rows = []
    for row in measured:
        figures = row.figures
        if row.failed:
            rows.append((str(row.key["setup"]), row.failed, "", "", ""))
            continue
        rows.append(
            (
                str(row.key["setup"]),
                f"{1e3 * figures['step_s']:,.0f} ms",
                f"{figures['speedup']:.2f}x" if "speedup" in figures else "",
                f"{figures['last_loss']:.4f}",
                f"{figures['last_loss'] / expected[0]:.4f}" if expected else "",
            )
        )
    key = measured[0].key
    where = f"{place_in_words(key)}, {options['steps']} steps"
    return Table(
        title=f"FSDP2, Llama ({key['size']}), {where}",
        columns=("setup", "step", f"against {baseline}", "loss at the end", "of it"),
        rows=tuple(rows),
        left=("setup",),
        notes=(f"The loss at the end is the mean over the last {LAST_LOSSES} steps and all ranks.",),
    )
