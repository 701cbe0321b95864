"""`deepytorch bench scaling`: throughput from one rank to all that there are, then predicted beyond.

The methodology is that of OneFlow's DLPerf and of Tianshu's evaluation, which reached 125 hosts of 8 V100: per-device
batches, the first 20 steps dropped, the next 100 averaged, the median of 5 repeats; throughput, speedup over one
device, and how far hardware is used. What is predicted comes from the simulator, with the compute and the links that
were measured, and is drawn apart.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup, places
from deepytorch.bench.figures import all_ranks, step_seconds, training_rows
from deepytorch.bench.jobs import HARDWARE, TrainingJob
from deepytorch.bench.options import Device, LabRate, Settle, check_at_least, check_choice, check_declared
from deepytorch.bench.plots import Plot, Points
from deepytorch.bench.results import Results, Row, decoded
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel

DDP, COMPILED, OURS = "ddp", "ddp_compile", "deepytorch"
SETUPS = (DDP, COMPILED, OURS)
MODELS = ("resnet50", "hf_Bert", "gpt2")
_PREDICTED = {DDP: "engine", OURS: "auto"}  # the algorithm of each setup in the simulator
_PARTS = ("forward_s", "backward_s", "optimizer_s", "cpu_s")
_SAME = ("model", "rows", "precision", "setup")  # what rows of one curve have in common


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """Measure throughput and use of hardware from one rank to many, by DLPerf's method; predict it for more.

    ResNet-50, BERT-base and GPT-2 under DDP, compiled DDP and with the import. Predictions take the compute of one rank
    and the links that were measured; what is predicted for the largest number that was measured, from a smaller one,
    says how far they are to be believed.
    """

    models: Annotated[tuple[str, ...], Option(help="With commas: resnet50, hf_Bert, gpt2.")] = MODELS
    setups: Annotated[tuple[str, ...], Option(help="With commas: ddp, ddp_compile, deepytorch.")] = SETUPS
    scale: Annotated[
        str,
        Option(
            metavar="full|small",
            help="full: models as published. small: a quarter of the widths, and the import compiles nothing.",
        ),
    ] = "full"
    batch_sizes: Annotated[
        tuple[int, ...], Option(help="Examples of a batch of each rank, with commas; 0: those of each model.")
    ] = (0,)
    precisions: Annotated[tuple[str, ...], Option(help="With commas: fp32, mixed (autocast to bf16).")] = (
        "fp32",
        "mixed",
    )
    hosts: Annotated[tuple[int, ...], Option(help="Numbers of hosts, with commas; those after 1 are simulated.")] = (1,)
    ranks: Annotated[int, Option(min=1, help="Ranks (processes) on each host; one rank alone is measured too.")] = 2
    rate: LabRate = "1gbit"
    predict: Annotated[tuple[int, ...], Option(help="Numbers of ranks to predict.")] = (8, 64, 256, 1000)
    device: Device = "cpu"
    skip: Annotated[int, Option(min=2, help="First steps, which are dropped.")] = 20
    steps: Annotated[int, Option(min=1, help="Steps that are averaged.")] = 100
    repeats: Annotated[int, Option(min=1, help="Such averages, of which the median counts.")] = 5
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "models", MODELS)
        check_choice(self, "setups", SETUPS)
        check_choice(self, "precisions", ("fp32", "mixed"))
        check_at_least(self, 0, "batch_sizes")
        check_at_least(self, 1, "hosts", "predict")


class Scaling(Benchmark[ScalingOptions]):
    """See this module."""

    name = "scaling"
    options = ScalingOptions

    def cells(self, options: ScalingOptions) -> Sequence[Cell]:
        """Return a cell for each model, batch, precision and number of ranks, one rank first."""
        several = places(options.hosts, options.ranks, (options.rate,))
        alone = [] if any(place.all_ranks == 1 for place in several) else [Place()]
        return [
            Cell(
                key={
                    "model": model,
                    "rows": rows or None,
                    "precision": precision,
                    **place.key,
                    "kind": "measured",
                },
                setups=[
                    self._setup(options, model, rows, precision, name, place.all_ranks)
                    for name in options.setups
                ],
                place=place,
                keeps_processes=options.scale == "small" and COMPILED not in options.setups,
            )
            for place, model, rows, precision in product(
                (*alone, *several), options.models, options.batch_sizes, options.precisions
            )
        ]  # fmt: skip

    @staticmethod
    def _setup(options: ScalingOptions, model: str, rows: int, precision: str, name: str, ranks: int) -> Setup:
        way = Parallel(
            sharding="ddp" if ranks > 1 else "none",
            precision=precision,
            compile="inductor" if name == COMPILED else "",
        )
        job = TrainingJob(
            model=model,
            size="cpu" if options.scale == "small" else "full",
            rows=rows,
            parallel=way,
            device=options.device,
            steps=options.steps * options.repeats,
            warm_up=options.skip,
            settle_s=options.settle,
            compiles=options.scale == "full",
            hardware=True,
            ready=name != COMPILED,
        )
        return Setup(name=name, job=job, imports=name == OURS)

    def rows(self, options: ScalingOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup, with the means of its hardware's use and what predictions start from."""
        rows = []
        for row in training_rows(cell, found, DDP):
            ranks = found[str(row.key["setup"])]
            seconds, part = step_seconds(ranks), options.steps
            means = [statistics.fmean(seconds[at : at + part]) for at in range(0, len(seconds), part)]
            row.figures["step_s"] = statistics.median(means)
            row.figures.pop("tokens_per_s", None)  # of another mean
            row.figures["examples_per_s"] = sum(rank["rows"] for rank in ranks) / row.figures["step_s"]
            hardware = ranks[0]["hardware"]
            row.figures.update({name: statistics.fmean(hardware[name]) for name in HARDWARE if hardware.get(name)})
            row.series.update({name: hardware[name] for name in ("seconds", *HARDWARE) if hardware.get(name)})
            _keep_compute(row, ranks)
            rows.append(row)
        return rows

    def derived(self, options: ScalingOptions, results: Results) -> list[Row]:
        """Return predicted steps: of the largest measured number of ranks from a smaller one, and of more."""
        return [row for curve in _curves(results) for row in _predictions(options, results, curve)]

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each model, and one of predictions."""
        found = [_table(results, str(model)) for model in dict.fromkeys(row.key["model"] for row in results.rows)]
        return [*found, *([_predicted_table(results)] if results.having(kind="predicted") else [])]

    def plots(self, results: Results) -> list[Plot]:
        """Return speedup and efficiency over ranks, and the use of hardware over time at the most ranks."""
        return [
            plot for model in dict.fromkeys(row.key["model"] for row in results.rows) for plot in _plots(results, model)
        ]


def _keep_compute(row: Row, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Keep what predictions start from: the compute of a rank, and the process group's topology and links."""
    from deepytorch.bench.calibrated import Compute, of_ranks

    if not ranks[0]["ready"]:
        return
    compute = of_ranks([[decoded(Compute, step) for step in rank["ready"]["steps"]] for rank in ranks])
    row.figures.update({name: getattr(compute, name) for name in _PARTS})
    row.figures["step_cpu_s"] = statistics.fmean(statistics.median(rank["cpu_seconds"]) for rank in ranks)
    times, sizes = zip(*compute.ready, strict=True)
    row.series.update(ready_s=list(times), ready_bytes=[float(size) for size in sizes])
    row.texts.update({name: json.dumps(value) for name, value in ranks[0]["ready"]["group"].items()})


def _curves(results: Results) -> Iterator[list[Row]]:
    """Yield the measured rows of each curve, fewest ranks first."""
    measured = [row for row in results.having(kind="measured") if not row.failed]
    for same in dict.fromkeys(tuple(row.key[name] for name in _SAME) for row in measured):
        rows = [row for row in measured if tuple(row.key[name] for name in _SAME) == same]
        yield sorted(rows, key=all_ranks)


def _predictions(options: ScalingOptions, results: Results, curve: Sequence[Row]) -> Iterator[Row]:
    from deepytorch.bench.calibrated import SharedCores

    if curve[0].key["setup"] not in _PREDICTED:
        return
    several = [row for row in curve if row.key["hosts"] != 1 and _group(results, row)]
    if not several or "ready_s" not in curve[0].series:
        return
    largest = several[-1]
    ranks, per_host = all_ranks(largest), int(largest.key["ranks"] or 1)
    for base in several[-2:]:  # a smaller number, and the largest one's own compute and links
        cpu = (base.figures["cpu_s"], base.figures["step_cpu_s"])
        shared = SharedCores(os.cpu_count() or 1, *cpu) if base.key["rate"] else None
        found = _simulated(options, _group(results, base), base, (ranks,), shared)[ranks]
        row = _predicted_row(largest, ranks // per_host, per_host, found, base)
        measured = largest.figures["step_s"]
        row.figures["step_rel_diff"] = abs(row.figures["step_s"] - measured) / measured
        yield row
    more = [number for number in options.predict if number > ranks and number % per_host == 0]
    for number, found in _simulated(options, _group(results, largest), curve[0], more, None).items():
        yield _predicted_row(largest, number // per_host, per_host, found, curve[0])


def _group(results: Results, row: Row) -> Mapping[str, str]:
    """Return the topology and links at a row's place: deepytorch's process group tells them, stock ones do not."""
    same = results.having(**{**row.key, "setup": OURS})
    return same[0].texts if same and "links" in same[0].texts else {}


def _simulated(
    options: ScalingOptions, group: Mapping[str, str], compute: Row, ranks: Sequence[int], shared: Any
) -> Mapping[int, Any]:
    """Return the steps on so many ranks, by the links of a group and the compute of a row."""
    from deepytorch.bench.calibrated import Compute, predicted, profile_of
    from deepytorch.comm.topology.cost import Links
    from deepytorch.comm.topology.topology import Topology

    ready = tuple(zip(compute.series["ready_s"], map(int, compute.series["ready_bytes"]), strict=True))
    parts = Compute(**{name: compute.figures[name] for name in _PARTS}, ready=ready)
    topology = Topology.from_json(json.loads(group["topology"]))
    links = Links.from_json(json.loads(group["links"]))
    profile = profile_of(str(compute.key["model"]), parts, options.device)
    return predicted(profile, topology, links, ranks, _PREDICTED[str(compute.key["setup"])], shared)


def _predicted_row(like: Row, hosts: int, per_host: int, found: Any, base: Row) -> Row:
    rows = like.figures["examples_per_s"] * like.figures["step_s"] / all_ranks(like)
    step_s = found.step_us / 1e6
    return Row(
        key={**like.key, "hosts": hosts, "ranks": per_host, "kind": "predicted", "from": all_ranks(base)},
        figures={
            "step_s": step_s,
            "examples_per_s": rows * hosts * per_host / step_s,
            "scaling_efficiency": found.efficiency,
        },
    )


def _alone(results: Results, row: Row) -> Row | None:
    """Return the row of one rank on the same curve."""
    same = {name: row.key[name] for name in _SAME}
    return next(
        (each for each in results.having(**same, kind="measured") if all_ranks(each) == 1 and not each.failed), None
    )


def _table(results: Results, model: str) -> Table:
    rows = []
    for row in results.having(model=model, kind="measured"):
        key, figures = row.key, row.figures
        where = f"{key['hosts']} x {key['ranks']}" + (f" at {key['rate']}" if key["rate"] else "")
        what = (where, str(key["rows"] or "own"), str(key["precision"]), str(key["setup"]))
        if row.failed:
            rows.append((*what, row.failed, *[""] * 6))
            continue
        alone = _alone(results, row)
        gain = figures["examples_per_s"] / alone.figures["examples_per_s"] if alone is not None else None
        use = [f"{figures[name]:,.0f}" if name in figures else "" for name in HARDWARE[:4]]
        shown = "" if gain is None else f"{gain:.2f}x"
        gpu = f"{figures['gpu_percent']:.0f}" if "gpu_percent" in figures else ""
        rows.append((*what, f"{figures['examples_per_s']:,.1f}", shown, *use, gpu))
    columns = ("hosts x ranks", "batch", "precision", "setup", "examples/s", "of one rank")
    use_names = ("CPU %", "memory %", "disk MB/s", "network Mbit/s", "GPU %")
    return Table(f"{model}, scale {results.options['scale']}", (*columns, *use_names), tuple(rows), columns[:4])


def _predicted_table(results: Results) -> Table:
    rows = []
    for row in results.having(kind="predicted"):
        off = row.figures.get("step_rel_diff")
        rows.append(
            (
                str(row.key["model"]),
                str(row.key["precision"]),
                str(row.key["setup"]),
                f"{all_ranks(row):,}",
                str(row.key["from"]),
                f"{1e3 * row.figures['step_s']:,.1f}",
                f"{100 * row.figures['scaling_efficiency']:.0f} %",
                "" if off is None else f"off by {100 * off:.0f} %",
            )
        )
    columns = ("model", "precision", "setup", "ranks", "compute of", "step ms", "efficiency", "measured")
    notes = (
        "Predicted from compute that was measured on the ranks of the fifth column, without communication, and from "
        "measured links: with cores of its own for each rank; where the number was measured as well, on shared cores.",
    )
    return Table("Predicted, not measured", columns, tuple(rows), columns[:3], notes)


def _plots(results: Results, model: Any) -> Iterator[Plot]:
    speedups, efficiencies = [], []
    for curve in _curves(results):
        alone = _alone(results, curve[0])
        if curve[0].key["model"] != model or alone is None:
            continue
        key = curve[0].key
        name = f"{key['setup']}, {key['precision']}" + (f", batch {key['rows']}" if key["rows"] else "")
        beyond = [
            row for row in results.having(**{each: key[each] for each in _SAME}, kind="predicted")
            if "step_rel_diff" not in row.figures
        ]  # fmt: skip
        for rows, label, predicted in ((curve, name, False), (beyond, f"{name}, predicted", True)):
            if rows:
                ranks = tuple(float(all_ranks(row)) for row in rows)
                gains = tuple(row.figures["examples_per_s"] / alone.figures["examples_per_s"] for row in rows)
                speedups.append(Points(label, ranks, gains, predicted=predicted))
                shares = tuple(gain / number for gain, number in zip(gains, ranks, strict=True))
                efficiencies.append(Points(label, ranks, shares, predicted=predicted))
    if speedups:
        yield Plot(
            f"{model}: throughput over that of one rank", "curves", "ranks", "times", tuple(speedups), True, True
        )
        yield Plot(f"{model}: scaling efficiency", "curves", "ranks", "speedup / ranks", tuple(efficiencies), True)
    last = [curve[-1] for curve in _curves(results) if curve[-1].key["model"] == model]
    for figure, unit in (
        ("cpu_percent", "CPU use, %"),
        ("network_mbit_per_s", "network, Mbit/s"),
        ("gpu_percent", "GPU use, %"),
    ):
        series = tuple(
            Points(
                f"{row.key['setup']}, {row.key['precision']}", tuple(row.series["seconds"]), tuple(row.series[figure])
            )
            for row in last
            if figure in row.series
        )
        if series:
            yield Plot(f"{model} on {all_ranks(last[0])} ranks: {unit}", "curves", "seconds", unit, series)
