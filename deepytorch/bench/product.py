"""`deepytorch bench deepytorch`: the table of gains that Deepytorch Training publishes, against native PyTorch.

Llama2-13B and Qwen2-14B fine-tuned under ZeRO-2, LLaMA-65B under ZeRO-3 with recomputation and offload, Stable
Diffusion 2.1 (dreambooth), ResNet50 and BERT under DDP. The published runs had two hosts of eight GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import by_setup, training_rows, whole_passes
from deepytorch.bench.jobs import TrainingJob, asked
from deepytorch.bench.options import (
    Device,
    NumHosts,
    Precision,
    RanksOfHost,
    Rate,
    Scale,
    Settle,
    TextFile,
    check_choice,
    check_declared,
)
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel, unavailable

NATIVE, OURS = "native PyTorch", "deepytorch"


@dataclass(frozen=True, slots=True)
class _Line:
    """A line: the model, its micro-batch as published and on a CPU, how it is sharded, the published gain."""

    model: str
    rows: tuple[int, int]
    way: Parallel
    published: str


_LINES = {
    "llama2-13b": _Line("llama2_13b", (4, 4), Parallel(sharding="zero2", precision="mixed"), "+48 %"),
    "qwen2-14b": _Line("qwen2_14b", (4, 4), Parallel(sharding="zero2", precision="mixed"), "+21 %"),
    "llama-65b": _Line(
        "llama_65b", (8, 8), Parallel(sharding="zero3", precision="mixed", recompute=True, offload=True), "+30 %"
    ),
    "sd-2.1": _Line("sd_unet", (5, 2), Parallel(precision="mixed"), "+22 %"),
    "resnet50": _Line("resnet50", (512, 8), Parallel(sharding="ddp", precision="mixed"), "+89 %"),
    "bert": _Line("hf_Bert", (32, 8), Parallel(sharding="ddp", precision="mixed"), "+42 %"),
}
_ONE_RANK = ("sd-2.1",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductOptions:
    """Measure the models that deepytorch is advertised with, in native PyTorch and with the one line.

    Llama2-13B and Qwen2-14B (ZeRO-2), LLaMA-65B (ZeRO-3, recomputation, offload), Stable Diffusion 2.1, ResNet50 and
    BERT. Sharding is DeepSpeed's; where that is not installed the row says so.
    """

    models: Annotated[tuple[str, ...], Option(help="Lines of the table, with commas.")] = tuple(_LINES)
    scale: Scale = "full"
    sharding: Annotated[
        str,
        Option(
            metavar="as-published|fsdp2|ddp",
            help="What shards the language models: DeepSpeed's ZeRO, or another way where that is not installed.",
        ),
    ] = "as-published"
    precision: Precision = "mixed"
    hosts: NumHosts = 1
    ranks: RanksOfHost = 2
    rate: Rate = "1gbit"
    data: TextFile = None
    device: Device = "cpu"
    steps: Annotated[int, Option(min=2, help="Steps that are timed.")] = 20
    warm_up: Annotated[int, Option(min=2, help="Steps before them.")] = 4
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "models", _LINES)


class Product(Benchmark[ProductOptions]):
    """See this module."""

    name = "deepytorch"
    options = ProductOptions

    def cells(self, options: ProductOptions) -> Sequence[Cell]:
        """Return a cell for each line."""
        return [self._cell(options, name) for name in options.models]

    @staticmethod
    def _cell(options: ProductOptions, name: str) -> Cell:
        line, small = _LINES[name], options.scale == "small"
        place = Place(threads=None) if name in _ONE_RANK else Place.of(options.hosts, options.ranks, options.rate)
        alone = place.all_ranks == 1
        way = replace(line.way, precision=options.precision)
        if way.sharding.startswith("zero") and options.sharding != "as-published":
            way = replace(way, sharding=options.sharding, offload=False)
        if alone:
            way = replace(way, sharding="none", offload=False)
        job = TrainingJob(
            model=line.model,
            **asked(options),
            rows=line.rows[small],
            parallel=way,
            optimizer="sgd" if line.model == "resnet50" else "adamw",
            batches=8,
            steps=whole_passes(options.steps, 8),
        )
        configuration = ", ".join(
            [
                way.sharding,
                f"micro-batch {job.rows}",
                way.precision,
                *(["recomputation"] if way.recompute else []),
                *(["offload"] if way.offload else []),
            ]
        )
        key = {
            "line": name,
            "hosts": place.hosts,
            "ranks": place.ranks,
            "rate": place.rate,
            "configuration": configuration,
        }
        setups = [Setup(name=NATIVE, job=job), Setup(name=OURS, job=job, imports=True)]
        impossible = unavailable(way, line.model, options.device)
        return Cell(key=key, place=place, setups=setups, impossible=impossible)

    def rows(self, options: ProductOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return both rows of a line."""
        return training_rows(cell, found, NATIVE)

    def tables(self, results: Results) -> list[Table]:
        """Return the table, with the published gain beside the measured one."""
        rows = []
        for measured in results.together():
            native, ours = (by_setup(measured)[name] for name in (NATIVE, OURS))
            key = ours.key
            where = f"{key['hosts']} x {key['ranks']}" + (f" at {key['rate']}" if key["rate"] else "")
            shown = [
                row.failed or f"{row.figures.get('tokens_per_s', row.figures['examples_per_s']):,.1f}"
                for row in (native, ours)
            ]
            gain = "" if native.failed or ours.failed else f"{100 * (ours.figures['speedup'] - 1):+.0f} %"
            name = str(key["line"])
            runs = ours.texts.get("runs", "")
            rows.append((name, where, str(key["configuration"]), *shown, gain, _LINES[name].published, runs))
        columns = ("model", "hosts x ranks", "configuration", "native /s", "deepytorch /s", "gain", "published", "runs")
        notes = (
            "Per second: real tokens of texts, or examples. Published: by Alibaba Cloud on 2 x 8 GPUs (Stable "
            "Diffusion: 1 x 1) of ecs.ebmgn7vx.32xlarge, at full size.",
        )
        scale = results.options["scale"]
        return [Table(f"Gains over native PyTorch, scale {scale}", columns, tuple(rows), (*columns[:3], "runs"), notes)]
