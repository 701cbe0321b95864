"""`deepytorch bench acspeed`: ACSpeed's table of data-parallel training, native DDP against `import deepytorch`.

Alibaba Cloud's ACSpeed is measured by PyTorch's DDP benchmark over eleven models, and shown as a scatter: `acc_ratio`,
how many times as fast as native DDP, over `ddp_acc`, the linearity of native DDP, which is its throughput on several
hosts / its throughput on one / hosts. The gain is largest where DDP scales worst.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup, places
from deepytorch.bench.figures import line_of, loss_rel_diff, percentiles, shown, step_seconds
from deepytorch.bench.jobs import TrainingJob
from deepytorch.bench.options import Device, check_at_least, check_choice, check_declared
from deepytorch.bench.plots import Plot, Points
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel

# Examples of a batch of each rank in the published table, and on a CPU, where ranks share few cores.
ROWS = {
    "alexnet": (128, 4),
    "resnet18": (16, 2),
    "resnet50": (32, 2),
    "vgg16": (64, 1),
    "timm_vovnet": (32, 2),
    "timm_vision_transformer": (8, 2),
    "pytorch_unet": (1, 1),
    "hf_Bart": (4, 1),
    "hf_Bert": (4, 1),
    "speech_transformer": (32, 4),
    "tts_angular": (64, 8),
}
DDP, OURS, HALF = "ddp", "deepytorch", "deepytorch, bf16 between hosts"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcspeedOptions:
    """Time data-parallel training of eleven known models, native DDP and with one line, over one host and several.

    Both take turns, step by step. Prints the percentiles of PyTorch's DDP benchmark, then for each model how far DDP
    scales (ddp_acc: throughput on several hosts / on one / hosts) and how many times as fast it is with the import
    (acc_ratio). Under torchrun it measures the ranks that are there; else it starts ranks on this machine, and several
    hosts are simulated, which needs root.
    """

    models: Annotated[tuple[str, ...], Option(help="Models, with commas; weights are random.")] = tuple(ROWS)
    scale: Annotated[
        str,
        Option(
            metavar="full|small",
            help="full: widths and batches as published. small: a quarter of the widths, few examples, and nothing is "
            "compiled, so that what is compared is communication.",
        ),
    ] = "full"
    precision: Annotated[str, Option(metavar="fp32|mixed", help="mixed: autocast to bf16.")] = "mixed"
    hosts: Annotated[tuple[int, ...], Option(help="Numbers of hosts, with commas.")] = (1,)
    ranks: Annotated[int, Option(min=1, help="Ranks (processes) on each host.")] = 2
    rates: Annotated[
        tuple[str, ...],
        Option(help="Of simulated hosts: bits per second that each may send and receive, such as 1gbit,200mbit."),
    ] = ("1gbit",)
    compress: Annotated[
        bool, Option("--compress", help="Measure once more with gradients cast to bf16 between hosts.")
    ] = False
    device: Device = "cpu"
    steps: Annotated[int, Option(min=1, help="Steps that are timed.")] = 20
    warm_up: Annotated[int, Option(min=2, help="Steps before them.")] = 5

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "models", ROWS)
        check_at_least(self, 1, "hosts")


class Acspeed(Benchmark[AcspeedOptions]):
    """See this module."""

    name = "acspeed"
    options = AcspeedOptions

    def cells(self, options: AcspeedOptions) -> Sequence[Cell]:
        """Return a cell for each model on each number of hosts, at each rate."""
        return [
            Cell(
                key={
                    "model": model,
                    **place.key,
                    "precision": options.precision,
                },
                place=place,
                setups=self._setups(options, model, place),
                keeps_processes=options.scale == "small",
            )
            for place, model in product(places(options.hosts, options.ranks, options.rates), options.models)
        ]

    @staticmethod
    def _setups(options: AcspeedOptions, model: str, place: Place) -> list[Setup]:
        small = options.scale == "small"
        job = TrainingJob(
            model=model,
            size="cpu" if small else "full",
            rows=ROWS[model][small],
            parallel=Parallel(sharding="ddp" if place.all_ranks > 1 else "none", precision=options.precision),
            device=options.device,
            steps=options.steps,
            warm_up=options.warm_up,
            compiles=not small,
            settle_s=600.0,
        )
        setups = [Setup(name=DDP, job=job), Setup(name=OURS, job=job, imports=True)]
        if options.compress and place.hosts > 1:
            setups.append(Setup(name=HALF, job=replace(job, compress="bf16"), imports=True))
        return setups

    def rows(self, options: AcspeedOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup: percentiles over all ranks and steps, and how far losses are from DDP's.

        `acc_ratio_error`: the standard error of `acc_ratio`, from the pairs of steps that took turns.
        """
        medians = {name: percentiles(ranks)["p50_s"] for name, ranks in found.items()}
        rows = []
        for name, ranks in found.items():
            figures = percentiles(ranks)
            figures["examples_per_s"] = ranks[0]["rows"] / figures["p50_s"]
            if name != DDP and DDP in found:
                figures["acc_ratio"] = medians[DDP] / medians[name]
                figures |= _error(step_seconds(found[DDP]), step_seconds(ranks), figures["acc_ratio"])
                figures["loss_rel_diff"] = loss_rel_diff(found[DDP], ranks)
            rows.append(Row(key={**cell.key, "setup": name}, figures=figures))
        return rows

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return rows in the line format of PyTorch's DDP benchmark: seconds, and examples of a rank per second."""
        return [line_of(row) for row in rows]

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each number of hosts and rate."""
        return [_table(results, *place) for place in _places(results)]

    def plots(self, results: Results) -> list[Plot]:
        """Return ACSpeed's scatter."""
        series = []
        for hosts, rate in _places(results):
            if hosts == 1:
                continue
            points = [
                (linear, row.figures["acc_ratio"], str(row.key["model"]))
                for row in results.having(hosts=hosts, rate=rate, setup=OURS)
                if not row.failed and (linear := linearity(results, row, DDP)) is not None
            ]
            if points:
                x, y, labels = zip(*points, strict=True)
                series.append(Points(f"{hosts} hosts, {rate or 'as they are'}", x, y, labels))
        title = "Gain over native DDP, over how far native DDP scales"
        return [Plot(title, "scatter", "ddp_acc", "acc_ratio", tuple(series), lines=(1.0,))] if series else []


def linearity(results: Results, row: Row, setup: str) -> float | None:
    """Return throughput on the row's hosts / throughput on one host / hosts, in one setup; None where one is missing.

    On one host bf16 between hosts changes nothing, so the exact setup stands for it there.
    """
    where = {name: row.key[name] for name in ("model", "hosts", "rate")}
    there = results.having(**where, setup=setup)
    alone = results.having(model=row.key["model"], hosts=1, setup=OURS if setup == HALF else setup)
    if not (there and alone and not there[0].failed and not alone[0].failed):
        return None
    return there[0].figures["examples_per_s"] / alone[0].figures["examples_per_s"]


def _error(theirs: Sequence[float], own: Sequence[float], ratio: float) -> dict[str, float]:
    pairs = [one / other for one, other in zip(theirs, own, strict=True)]
    relative = statistics.stdev(pairs) / statistics.fmean(pairs) if len(pairs) > 1 else 0.0
    return {"acc_ratio_error": ratio * relative / math.sqrt(len(pairs))} if relative else {}


def _places(results: Results) -> list[tuple[int, str | None]]:
    return list(dict.fromkeys((row.key["hosts"], row.key["rate"]) for row in results.rows))  # type: ignore[misc]


def _table(results: Results, hosts: int, rate: str | None) -> Table:
    rows = []
    for model in dict.fromkeys(row.key["model"] for row in results.having(hosts=hosts, rate=rate)):
        by_setup = {row.key["setup"]: row for row in results.having(hosts=hosts, rate=rate, model=model)}
        cells = [str(model)]
        for name in (DDP, OURS, HALF):
            row = by_setup.get(name)
            if row is None or row.failed:
                cells += [row.failed if row else "", "", ""][: 2 if name == DDP else 3]
                continue
            linear = linearity(results, row, name) if hosts > 1 else None
            cells += [f"{row.figures['examples_per_s']:,.1f}", "" if linear is None else f"{linear:.2f}"]
            gain = shown(row, "acc_ratio", "{:.2f}x") + shown(row, "acc_ratio_error", " ± {:.2f}")
            cells += [] if name == DDP else [gain]
        rows.append(tuple(cells))
    where = f"{hosts} hosts at {rate}" if rate else "one host" if hosts == 1 else f"{hosts} hosts"
    ranks = results.rows[0].key["ranks"]
    columns = ("model", "ddp", "ddp_acc", "ours", "ours_acc", "acc_ratio", "bf16", "bf16_acc", "bf16_ratio")
    title = f"{where}, {ranks} ranks each; examples of a rank per second, at the median step; ±: standard error"
    return Table(title, columns, tuple(rows), ("model",)).without_empty_columns()
