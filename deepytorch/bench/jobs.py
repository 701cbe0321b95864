"""The jobs that benchmarks give to ranks, as plain values; what does them loads torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepytorch.bench.ways import Parallel

# the figures of `hardware`
HARDWARE = ("cpu_percent", "memory_percent", "disk_mb_per_s", "network_mbit_per_s", "gpu_percent", "gpu_memory_percent")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The training of one rank: the model, and how it is trained.

    Attributes:
        model, size: Of the zoo.
        rows: Examples of a micro-batch of this rank; 0: those that the model is known with.
        parallel: How it is divided between ranks, its precision and the compiler.
        channels_last: Whether convolutions have the channels of their images last.
        fused: Whether the optimizer is fused.
        optimizer: sgd, as in PyTorch's benchmarks; adamw.
        lr: Its learning rate; 0: a usual one.
        data: The order of rows of text: random; grouped, rows of like lengths in a batch, as Trainer's group_by_length;
            balanced, rows dealt among ranks so that their costs are alike, as its batch_rebalance.
        kernels: liger, Liger's; flash, flash attention over rows laid end to end; flattened, both.
        file: A file in Alpaca layout for models that learn from text.
        batches: How many the run goes through again and again.
        steps: How many are timed, one a turn.
        together: Steps of a turn, which are timed as one: a GPU's host may run ahead in them.
        warm_up: Steps before them.
        settle_s: The most seconds until deepytorch has compiled and chosen what it runs, where it is imported.
        compiles: Whether deepytorch compiles at all.
        stock_group: Whether the process group is gloo or nccl, in whose place the import else gives its own.
        compress: The type that deepytorch's process group casts sums to between hosts.
        quantize: int8 or fp8: values of fully_shard are rounded to it between hosts, in deepytorch's process group.
        losses: Of so many first steps of the warm-up the losses are kept.
        hardware: Whether the use of the host's hardware is sampled while steps are timed.
        memory: Whether one more step is run for the most memory that it holds.
        ready: Whether a few more steps are run for the times at which gradients become ready, which a simulation takes.
        timeout_s: Of a collective.
    """

    model: str
    size: str = "cpu"
    rows: int = 0
    parallel: Parallel = field(default_factory=Parallel)
    channels_last: bool = False
    fused: bool = False
    optimizer: str = "sgd"
    lr: float = 0.0
    data: str = "random"
    kernels: str = ""
    file: Path | None = None
    device: str = "cpu"
    batches: int = 4
    steps: int = 10
    together: int = 1
    warm_up: int = 3
    settle_s: float = 0.0
    compiles: bool = True
    stock_group: bool = False
    compress: str | None = None
    quantize: str | None = None
    losses: int = 5
    hardware: bool = False
    memory: bool = False
    ready: bool = False
    timeout_s: float = 600.0


def asked(options: Any) -> dict[str, Any]:
    """Return the fields of a `TrainingJob` that options of a benchmark say, those that it has."""
    named = {"size": "size", "rows": "batch_size", "file": "data", "device": "device", "settle_s": "settle"}
    named |= {name: name for name in ("batches", "together", "warm_up")}
    found = {field: getattr(options, name) for field, name in named.items() if hasattr(options, name)}
    return found | ({"size": "cpu" if options.scale == "small" else "full"} if hasattr(options, "scale") else {})


@dataclass(frozen=True, kw_only=True)
class OverlapJob(TrainingJob):
    """The training of one rank under DDP, timed in parts. python_reducer: torch.compile traces DDP's reducer, too."""

    python_reducer: bool = False


PREDICTED_OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")  # those that the cost model knows
OPS = (*PREDICTED_OPS, "all_to_all", "barrier")
REDUCING_OPS = ("all_reduce", "reduce_scatter")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "int8", "uint8")


@dataclass(frozen=True, kw_only=True)
class GroupSetup:
    """One process group among those that are compared.

    Attributes:
        name: As tables name it.
        backend: deepytorch or gloo.
        algorithm, compress: Of deepytorch's; None: it chooses, and values are sent as they are.
        allocated: Whether buffers are from `comm.allocate`.
    """

    name: str
    backend: str
    algorithm: str | None = None
    compress: str | None = None
    allocated: bool = False


@dataclass(frozen=True, kw_only=True)
class CollectiveJob:
    """A collective of one size, in several groups of the same ranks.

    Attributes:
        op, dtype: Of `OPS` and `DTYPES`.
        count: Elements of the larger side: the output of all_gather, the input of reduce_scatter.
        redop: sum, avg, min or max.
        groups: What takes turns.
        rounds: How often each is timed.
        min_time_ms: Milliseconds for which each is timed at least, over all rounds.
        timeout_s: Of a collective.
    """

    op: str
    count: int
    groups: tuple[GroupSetup, ...]
    dtype: str = "float32"
    redop: str = "sum"
    rounds: int = 5
    min_time_ms: float = 100.0
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class ChoicesJob:
    """The choices of deepytorch's group for a collective of several sizes, in bytes; else as `CollectiveJob`."""

    op: str
    sizes: tuple[int, ...]
    group: GroupSetup
    dtype: str = "float32"
    redop: str = "sum"
    timeout_s: float = 600.0
