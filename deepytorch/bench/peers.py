"""`deepytorch bench peers`: the same training under everything that people use today, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import training_rows, whole_passes
from deepytorch.bench.jobs import TrainingJob, asked
from deepytorch.bench.options import (
    Device,
    ModelSize,
    Precision,
    Settle,
    TextFile,
    check_choice,
    check_declared,
)
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.ways import Parallel, unavailable

OURS = "deepytorch"


@dataclass(frozen=True, slots=True)
class _Peer:
    """One way: what is set of the job, what it needs, and whether it is for several ranks."""

    way: Mapping[str, Any]
    job: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    gpu: bool = False


_LIGER, _FLASH = "liger_kernel", "flash_attn"
PEERS = {
    "eager": _Peer({}, {}),
    "torch.compile": _Peer({"compile": "inductor"}, {}),
    "group_by_length": _Peer({}, {"data": "grouped"}, ("transformers",)),
    "group_by_length + torch.compile": _Peer({"compile": "inductor"}, {"data": "grouped"}, ("transformers",)),
    "batch_rebalance": _Peer({}, {"data": "balanced"}, ("transformers",)),
    "Liger": _Peer({}, {"kernels": "liger"}, (_LIGER,), gpu=True),
    "flattening + flash attention": _Peer({}, {"kernels": "flash"}, (_FLASH,), gpu=True),
    "flattening + flash attention + Liger": _Peer(
        {"compile": "inductor"}, {"kernels": "flattened"}, (_FLASH, _LIGER), gpu=True
    ),
    "FSDP2": _Peer({"sharding": "fsdp2"}, {}),
    "FSDP2 + torch.compile": _Peer({"sharding": "fsdp2", "compile": "inductor"}, {}),
    "DeepSpeed ZeRO-2": _Peer({"sharding": "zero2"}, {}, ("deepspeed",)),
    "DeepSpeed ZeRO-3": _Peer({"sharding": "zero3"}, {}, ("deepspeed",)),
    "DeepSpeed ZeRO-3 + DeepCompile": _Peer(
        {"sharding": "zero3", "compile": "deepcompile"}, {}, ("deepspeed",), gpu=True
    ),
    OURS: _Peer({}, {}),
    "deepytorch + FSDP2": _Peer({"sharding": "fsdp2"}, {}),
    "deepytorch + group_by_length": _Peer({}, {"data": "grouped"}, ("transformers",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersOptions:
    """Time the same training under what people use today, and with the import, in turns.

    Eager, torch.compile, DDP and FSDP2 (with the settings that overlap and bucket collectives in stock's graphs),
    DeepSpeed, Liger, flattened rows with flash attention, group_by_length, batch_rebalance. What is not installed, or
    needs a GPU, is a row that says so.
    """

    model: Annotated[str, Option(metavar="NAME", help="llama, or another model that learns from text.")] = "llama"
    size: ModelSize = "cpu"
    peers: Annotated[tuple[str, ...], Option(help="Names, with commas.")] = tuple(PEERS)
    precision: Precision = "fp32"
    batch_size: Annotated[int, Option(min=1, help="Rows in a batch of each rank.")] = 8
    data: TextFile = None
    ranks: Annotated[int, Option(min=1, help="Ranks (processes) on this machine; several train under DDP.")] = 1
    device: Device = "cpu"
    batches: Annotated[int, Option(min=1, help="Batches that are gone through again and again.")] = 8
    steps: Annotated[int, Option(min=2, help="Steps that are timed, in turns.")] = 16
    together: Annotated[
        int, Option(min=1, help="Steps of a turn, which are timed as one: a GPU's host may run ahead in them.")
    ] = 1
    settle: Settle = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_declared(self)
        check_choice(self, "peers", PEERS)


class Peers(Benchmark[PeersOptions]):
    """See this module."""

    name = "peers"
    options = PeersOptions

    def cells(self, options: PeersOptions) -> Sequence[Cell]:
        """Return one cell, in which all that can run takes turns, and one that names each of the others."""
        able: list[Setup] = []
        place = Place(ranks=options.ranks, threads=None if options.ranks == 1 else 1)
        key = {"model": options.model, "ranks": options.ranks, "precision": options.precision}
        cells = []
        for name in options.peers:
            peer = PEERS[name]
            sharding = peer.way.get("sharding", "ddp" if options.ranks > 1 else "none")
            way = Parallel(**{**peer.way, "sharding": sharding, "precision": options.precision})
            job = TrainingJob(
                model=options.model,
                **asked(options),
                parallel=way,
                optimizer="adamw",
                steps=whole_passes(options.steps, options.batches),
                warm_up=2 * options.batches,
                memory=True,
                **peer.job,
            )
            setup = Setup(name=name, job=job, imports=name.startswith(OURS))
            why = self._unavailable(options, peer, way)
            if why is None:
                able.append(setup)
            else:
                cells.append(Cell(key=key, place=place, setups=[setup], impossible=why))
        return [Cell(key=key, place=place, setups=able), *cells] if able else cells

    @staticmethod
    def _unavailable(options: PeersOptions, peer: _Peer, way: Parallel) -> str | None:
        missing = [name for name in peer.needs if find_spec(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if peer.gpu and options.device != "cuda":
            return "needs a GPU"
        return unavailable(way, options.model, options.device, options.ranks)

    def rows(self, options: PeersOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each way; `speedup` is over eager's time, where it takes the same batches."""
        rows = training_rows(cell, found, "eager")
        for row in rows:
            peer = PEERS[str(row.key["setup"])]
            if peer.job:  # other batches
                row.figures.pop("speedup", None)
            if peer.job or peer.way.get("sharding"):  # or other weights, which are drawn in parts
                row.figures.pop("loss_rel_diff", None)
        return rows

    def tables(self, results: Results) -> list[Table]:
        """Return the table, the fastest first, and what did not run."""
        ran = sorted((row for row in results.rows if not row.failed), key=lambda row: -row.figures["tokens_per_s"])
        ours = next((row for row in ran if row.key["setup"] == OURS), None)
        rows = []
        for row in ran:
            rate = row.figures["tokens_per_s"]
            against = "" if ours is None else f"{ours.figures['tokens_per_s'] / rate:.2f}x"
            rows.append(
                (
                    str(row.key["setup"]),
                    f"{1e3 * row.figures['step_s']:,.1f}",
                    f"{rate:,.0f}",
                    against,
                    f"{row.figures['peak_mb']:,.0f}",
                    f"{row.figures['first_s']:,.1f}",
                    row.texts.get("disturbed", "") or row.texts.get("runs", ""),
                )
            )
        columns = ("", "step ms", "real tokens/s", "deepytorch is", "peak MB", "first 2 steps s", "runs")
        missing = tuple(f"Not measured: {row.key['setup']}, {row.failed}." for row in results.rows if row.failed)
        key = results.rows[0].key
        title = f"{key['model']}, {key['ranks']} ranks, {key['precision']}, batch {results.options['batch_size']}"
        versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        return [Table(title, columns, tuple(rows), ("", "runs"), (*missing, versions))]
