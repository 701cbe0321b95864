"""`deepytorch bench memory`: PAI-Megatron-Patch's tables of throughput and memory, with the import and without.

BERT (110M, 512 positions) by precision and by graph optimisation, a GPT-like decoder of 1.3B parameters by how state is
sharded, and by tensor x pipeline parallelism. Memory that does not suffice is a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import by_setup, shown, training_rows
from deepytorch.bench.jobs import TrainingJob, asked
from deepytorch.bench.options import Device, Scale, Settle, check_choice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel, unavailable

PLAIN, OURS = "without", "with the import"
_BERT, _GPT = "bert_512", "gpt_1.3b"
TABLES = ("precision", "sharding", "parallelism", "compile")
# (tensor, pipeline) of the published table
_DIVIDED = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4))
_SHARDINGS = ("ddp", "oss", "zero1", "zero2", "zero3", "fsdp2")
_GPT_ROWS, _BERT_ROWS = (1, 1), (16, 4)  # of a micro-batch: as published, and on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """Measure throughput and peak memory by precision, state sharding, tensor and pipeline parallelism, and compiler.

    The tables are those of PAI-Megatron-Patch: BERT, and a GPT-like decoder (a Llama of that shape: 24 layers of 2048).
    Each row is measured without the import and with it, in turns. Peak memory is that of tensors, weights included, of
    the rank that holds most. What cannot run here, or finds no memory, is a row that says so.
    """

    tables: Annotated[tuple[str, ...], Option(help="With commas: precision, sharding, parallelism, compile.")] = TABLES
    scale: Scale = "full"
    ranks: Annotated[int, Option(min=1, help="Ranks (processes) on this machine.")] = 4
    precisions: Annotated[tuple[str, ...], Option(help="With commas: fp32, mixed (autocast to bf16), fp16 (GPUs).")] = (
        "fp32",
        "mixed",
    )
    device: Device = "cpu"
    steps: Annotated[int, Option(min=2, help="Steps that are timed.")] = 20
    warm_up: Annotated[int, Option(min=2, help="Steps before them.")] = 4
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "tables", TABLES)
        check_choice(self, "precisions", ("fp32", "mixed", "fp16"))


class Memory(Benchmark[MemoryOptions]):
    """See this module."""

    name = "memory"
    options = MemoryOptions

    def cells(self, options: MemoryOptions) -> Sequence[Cell]:
        """Return a cell for each row of the tables; both setups of it take turns."""
        half = options.precisions[-1]
        asked = [("precision", _BERT, Parallel(sharding="ddp", precision=each)) for each in options.precisions]
        asked += [("sharding", _GPT, Parallel(sharding="ddp"))]
        asked += [("sharding", _GPT, Parallel(sharding=each, precision=half)) for each in _SHARDINGS]
        asked += [("parallelism", _GPT, way) for way in self._divided(options.ranks, half)]
        asked += [
            ("compile", _BERT, Parallel(sharding="ddp", precision=precision, compile=compiler))
            for precision in options.precisions
            for compiler in ("", "inductor")
        ]
        return [self._cell(options, *each) for each in dict.fromkeys(asked) if each[0] in options.tables]

    @staticmethod
    def _divided(ranks: int, precision: str) -> Iterator[Parallel]:
        """Yield the ways of the published table that fit the ranks."""
        for tensor, pipeline in _DIVIDED:
            replicas, left = divmod(ranks, tensor * pipeline)
            if replicas and not left:
                yield Parallel(
                    sharding="ddp" if replicas > 1 else "none",
                    tensor=tensor,
                    pipeline=pipeline,
                    precision=precision,
                    accumulate=ranks // replicas if pipeline > 1 else 1,
                )

    @staticmethod
    def _cell(options: MemoryOptions, table: str, model: str, way: Parallel) -> Cell:
        if options.ranks == 1 and way.sharding == "ddp":
            way = Parallel(precision=way.precision, compile=way.compile)
        small = options.scale == "small"
        job = TrainingJob(
            model=model,
            **asked(options),
            rows=(_BERT_ROWS if model == _BERT else _GPT_ROWS)[small],
            parallel=way,
            optimizer="adamw",
            steps=options.steps,
            memory=True,
        )
        key = {
            "table": table,
            "model": model,
            "ranks": options.ranks,
            "sharding": way.sharding,
            "tensor x pipeline": f"{way.tensor}x{way.pipeline}",
            "precision": way.precision,
            "compile": way.compile or None,
        }
        return Cell(
            key=key,
            place=Place(ranks=options.ranks),
            setups=[Setup(name=PLAIN, job=job), Setup(name=OURS, job=job, imports=True)],
            impossible=unavailable(way, "bert" if model == _BERT else "llama", options.device, options.ranks),
        )

    def rows(self, options: MemoryOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return both rows of a cell."""
        return training_rows(cell, found, PLAIN)

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each of the published ones."""
        return [_table(results, table) for table in dict.fromkeys(str(row.key["table"]) for row in results.rows)]


def _table(results: Results, table: str) -> Table:
    rows = []
    for measured in results.together():
        key = measured[0].key
        if key["table"] != table:
            continue
        plain, ours = (by_setup(measured)[name] for name in (PLAIN, OURS))
        what = (key["sharding"], key["tensor x pipeline"], key["precision"], key["compile"] or "eager")
        gain = "" if plain.failed else shown(ours, "speedup", "{:.2f}x")
        rows.append((*map(str, what), *_shown(plain), *_shown(ours), gain))
    model = results.having(table=table)[0].key["model"]
    columns = ("sharding", "tensor x pipeline", "precision", "compiler", "samples/s", "peak MB")
    return Table(
        title=f"{model}, {results.rows[0].key['ranks']} ranks",
        columns=(*columns, "samples/s with import", "peak MB with import", "gain"),
        rows=tuple(rows),
        left=columns[:4],
    )


def _shown(row: Row) -> tuple[str, str]:
    if row.failed:
        return row.failed, ""
    figures = row.figures
    rate = f"{figures['examples_per_s']:,.2f} +- {figures['examples_per_s_deviation']:.2f}"
    return rate, f"{figures['peak_mb']:,.0f}"
