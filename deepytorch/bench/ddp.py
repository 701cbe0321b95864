"""`deepytorch bench ddp`: a data-parallel step in stock DDP and in deepytorch, and the communication that is hidden."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import line_of, loss_rel_diff, percentiles, whole_passes
from deepytorch.bench.jobs import OverlapJob
from deepytorch.bench.options import (
    FlowRate,
    NumHosts,
    RanksOfHost,
    Rate,
    Settle,
    TextFile,
    check_choice,
    check_declared,
    check_hosts,
)
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.timeline import Span, plot_steps, write_trace
from deepytorch.bench.ways import Parallel
from deepytorch.bench.zoo import MODELS
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError

OURS = "deepytorch"
SETUPS = ("ddp", "ddp_compile", "ddp_python_reducer", OURS)
_DATA = ("llama",)  # models that learn from texts of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """Time data-parallel training steps in stock DDP and with deepytorch, and the communication that stays visible.

    Each setup trains in processes of its own; they take turns, step by step, once each has compiled what it runs.
    Seconds are of forward and backward, over all ranks, printed as PyTorch's own DDP benchmark prints them. Then, for
    each, the parts that were timed alone, what of the communication is exposed, and overlap_efficiency: (forward +
    the longer of backward and communication) / step.

    Under torchrun it runs on the ranks that are there; else it starts ranks on this machine, and several hosts are
    simulated, which needs root. Llama learns from the texts of --data; batches of other models are random.
    """

    models: Annotated[tuple[str, ...], Option(help="Models of the zoo, with commas; weights are random.")] = ("vgg16",)
    size: Annotated[str, Option(metavar="cpu|full", help="full: as published; cpu: a quarter of that width.")] = "cpu"
    batch_size: Annotated[int, Option(min=1, help="Rows in a batch of each rank.")] = 8
    precision: Annotated[str, Option(metavar="fp32|mixed", help="mixed: autocast to bf16.")] = "fp32"
    setups: Annotated[
        tuple[str, ...],
        Option(
            help="What to compare, with commas. ddp: eager DDP. ddp_compile: DDP under torch.compile. "
            "ddp_python_reducer: the same, with the gradient reduction traced too. deepytorch: DDP with the import."
        ),
    ] = SETUPS
    backend: Annotated[
        str,
        Option(
            metavar="deepytorch|gloo",
            help="Process group that deepytorch runs on; stock DDP has gloo, or nccl on GPUs.",
        ),
    ] = "deepytorch"
    compress: Annotated[
        str | None,
        Option(
            metavar="bf16|fp16", help="Cast gradients to this type between hosts, with deepytorch only. Default: none."
        ),
    ] = None
    device: Annotated[str, Option(metavar="cpu|cuda", help="Where to train; cuda needs torchrun.")] = "cpu"
    data: TextFile = None
    ranks: RanksOfHost = 2
    hosts: NumHosts = 1
    rate: Rate = None
    flow_rate: FlowRate = None
    steps: Annotated[int, Option(min=1, help="Steps that are timed, in turns.")] = 10
    settle: Settle = 300.0
    timeline: Annotated[
        Path | None,
        Option(metavar="PNG", help="Draw one step of each as a picture; a Chrome trace (.json) goes beside it."),
    ] = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "models", MODELS)
        check_choice(self, "setups", SETUPS)
        check_hosts(self)
        if self.compress is not None and self.backend == "gloo":
            raise ConfigError("compress is of deepytorch's process group, found backend gloo; expected deepytorch.")
        if self.data is not None and set(self.models) - set(_DATA):
            raise ConfigError(f"Data was given for {', '.join(self.models)}; expected llama, which learns from texts.")
        if self.timeline is not None and len(self.models) > 1:
            raise ConfigError(f"A timeline is of one model, found {', '.join(self.models)}; expected one.")


class Ddp(Benchmark[DdpOptions]):
    """See this module."""

    name = "ddp"
    options = DdpOptions

    def cells(self, options: DdpOptions) -> Sequence[Cell]:
        """Return a cell for each model."""
        place = Place.of(options.hosts, options.ranks, options.rate, options.flow_rate)
        return [
            Cell(
                key={
                    "model": model,
                    "size": options.size,
                    "batch size": options.batch_size,
                    **place.key,
                    "flow rate": place.flow_rate,
                    "precision": options.precision,
                    "group": options.compress or options.backend,
                },
                setups=[_setup(options, model, name) for name in options.setups],
                place=place,
                kind="overlap",
                impossible="one rank has nothing to reduce" if place.all_ranks == 1 else None,
            )
            for model in options.models
        ]

    def rows(self, options: DdpOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup, and draw the timeline.

        Seconds of parts are medians over all ranks and steps: `forward_s` and `backward_s` without communication,
        `optimizer_s`, `communication_s` of the setup's buckets alone. `exposed_s` is the time of forward and backward
        beyond that of compute alone; an `overlap_efficiency` of 1 is the best that overlap can reach. `ratio`: the time
        of forward and backward over deepytorch's. `max_grad_rel_diff`, `loss_rel_diff`: from the first setup's.
        """
        if options.timeline is not None and found and process_environment().get("RANK", "0") == "0":
            spans = {name: [Span(**each) for each in ranks[0]["spans"]] for name, ranks in found.items()}
            plot_steps(options.timeline, f"{options.models[0]}, batch {options.batch_size}: one step of rank 0", spans)
            write_trace(options.timeline.with_suffix(".json"), spans)
        return [Row(key={**cell.key, "setup": name}, **_findings(name, found)) for name in found]

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return rows in the line format of PyTorch's DDP benchmark: seconds, and examples of a rank per second."""
        return [line_of(row) for row in rows]

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each model."""
        return [_table(rows) for rows in results.together()]


def _setup(options: DdpOptions, model: str, name: str) -> Setup:
    ours = name == OURS
    job = OverlapJob(
        model=model,
        size=options.size,
        rows=options.batch_size,
        parallel=Parallel(
            sharding="ddp", precision=options.precision, compile="" if name in ("ddp", OURS) else "inductor"
        ),
        file=options.data,
        device=options.device,
        steps=whole_passes(options.steps, 4),
        settle_s=options.settle,
        stock_group=options.backend == "gloo",
        compress=options.compress if ours else None,
        python_reducer=name == "ddp_python_reducer",
    )
    return Setup(name=name, job=job, imports=ours)


def _findings(name: str, found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    ranks, first = found[name], next(iter(found.values()))

    def median(what: str, part: str) -> float:
        return statistics.median(step[part] for rank in ranks for step in rank[what])

    figures = percentiles(ranks)
    step, forward, backward = figures["p50_s"], median("alone", "forward"), median("alone", "backward")
    communication = statistics.median(chain.from_iterable(rank["communication"] for rank in ranks))
    figures |= {
        "examples_per_s": ranks[0]["rows"] / step,
        "forward_s": forward,
        "backward_s": backward,
        "optimizer_s": median("parts", "optimizer"),
        "communication_s": communication,
        "exposed_s": max(0.0, step - forward - backward),
        "overlap_efficiency": (forward + max(backward, communication)) / step,
        "max_grad_rel_diff": grad_rel_diff(first[0]["gradients"], ranks[0]["gradients"]),
        "loss_rel_diff": loss_rel_diff(first, ranks),
        "process_mb": max(rank["process_mb"] for rank in ranks),
    }
    if OURS in found and name != OURS:
        figures["ratio"] = step / percentiles(found[OURS])["p50_s"]
    texts = {"runs": "; ".join(filter(None, [ranks[0]["plan"], *ranks[0]["fallbacks"]]))} if name == OURS else {}
    return {"figures": figures, "series": {"bucket_bytes": ranks[0]["bucket_bytes"]}, "texts": texts}


def grad_rel_diff(expected: Mapping[str, list[float]], found: Mapping[str, list[float]]) -> float:
    """Return an estimate of the largest relative difference of a parameter's gradient; 1e9 if one is not finite.

    Both are of `overlap.projected`. A difference's norm is estimated by that of the projections' difference, which is
    off by about a quarter with 8 of them (one standard deviation: 1 / sqrt(2 x 8)). It is divided by the expected norm.
    A gradient that is zero except for rounding has no meaningful difference: 0.001 of the largest norm is the least
    that is divided by. A gradient that is there in one of the two only differs by 1.
    """
    floor = 1e-3 * max(norm for norm, *_ in expected.values())
    largest = 0.0
    for name, (norm, *projections) in expected.items():
        other, *others = found[name]
        difference = math.dist(projections, others) / max(norm, floor) if bool(norm) == bool(other) else 1.0
        largest = max(largest, difference if math.isfinite(difference) else 1e9)
    return largest


_COLUMNS = (
    *("setup", "step ms", "forward", "backward", "communication", "exposed", "efficiency", "ratio"),
    *("gradients off by", "losses off by", "runs"),
)
_MS = ("p50_s", "forward_s", "backward_s", "communication_s", "exposed_s")
_NOTE = (
    "A step is forward and backward, the median. Its parts and communication were timed alone. Ratio: to deepytorch's."
)


def _table(rows: Sequence[Row]) -> Table:
    key = rows[0].key
    rates = [f"{name} {key[name]}" for name in ("rate", "flow rate") if key[name]]
    group = [] if key["group"] == OURS else [f"deepytorch on {key['group']}"]
    where = ", ".join([f"{key['hosts']} x {key['ranks']} ranks", *rates, *group])
    title = f"{key['model']} ({key['size']}), batch {key['batch size']}, {key['precision']}, {where}"
    shown = tuple(_shown(row) for row in rows)
    return Table(title, _COLUMNS, shown, ("setup", "runs"), (_NOTE,)).without_empty_columns()


def _shown(row: Row) -> tuple[str, ...]:
    figures = row.figures
    if row.failed:
        return (str(row.key["setup"]), *[""] * (len(_COLUMNS) - 2), row.failed)
    return (
        str(row.key["setup"]),
        *(f"{1e3 * figures[part]:,.1f}" for part in _MS),
        f"{figures['overlap_efficiency']:.2f}",
        f"{figures['ratio']:.2f}x" if "ratio" in figures else "",
        f"{figures['max_grad_rel_diff']:.1e}",
        f"{figures['loss_rel_diff']:.1e}" if "loss_rel_diff" in figures else "",
        row.texts.get("runs", ""),
    )
