"""The layout of a result file of `deepytorch bench comm`, checked when it is written and when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.bench.results import Record, read_result

PREDICTED_OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")  # those that the cost model knows
OPS = (*PREDICTED_OPS, "all_to_all", "barrier")
REDUCING_OPS = ("all_reduce", "reduce_scatter")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "int8", "uint8")
REDOPS = ("sum", "avg", "min", "max")
NO_REDOP = "none"  # shown for an op that reduces nothing, as in nccl-tests


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: the share of a buffer that one rank's link has to carry.

    The definition is that of nccl-tests, so that figures of different numbers of ranks compare with the hardware's.
    """
    if op in ("broadcast", "barrier"):
        return float(op == "broadcast")
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCell(Record):
    """One op of one size in one arm. GB are 1e9 bytes; a time is the slowest rank's, per collective.

    `bytes` is the larger side: the output of all_gather, the input of reduce_scatter. A barrier moves none.
    """

    what = "cell"

    op: str
    backend: str
    algorithm: str  # the one that ran; the default, if a backend does not report it
    dtype: str
    redop: str
    bytes: int
    ranks: int  # of all hosts
    hosts: int
    time_us: float  # median over the rounds
    time_us_quartiles: list[float]  # over the rounds
    algbw: float  # bytes / time, in GB/s
    busbw: float  # algbw x `bus_factor`
    wrong: int  # wrong elements, summed over the ranks
    # beyond what was asked for
    arm: str  # the name that distinguishes arms of one backend
    compress: str | None  # dtype that is sent between hosts, or null
    allocated: bool  # buffers from `comm.allocate`
    iterations: int  # collectives per round

    def __post_init__(self) -> None:
        """Raise `DataError` for a value that no run can give."""
        Record.__post_init__(self)
        for name, known in (("op", OPS), ("dtype", DTYPES), ("redop", (*REDOPS, NO_REDOP))):
            self.require(getattr(self, name) in known, name, f"one of {', '.join(known)}")
        for name in ("bytes", "ranks", "hosts", "time_us", "iterations"):
            self.require(getattr(self, name) > 0, name, "above 0")
        quartiles = self.time_us_quartiles
        self.require(
            len(quartiles) == 3 and quartiles == sorted(quartiles), "time_us_quartiles", "three times, ascending"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRatio(Record):
    """The ratios of one cell. None: not measured, or without a meaning for the op."""

    what = "ratio"

    op: str
    arm: str
    bytes: int
    ratio_vs_gloo: float | None  # gloo's time / the arm's: above 1 is faster
    # all_reduce on one host: 2 x bytes (read once, written once) / time / copy bandwidth of a rank
    copy_efficiency: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommSummary(Record):
    """The ratio of every cell, and the machine and links that were measured."""

    what = "summary"

    ratios: list[CommRatio]
    machine: str
    torch_version: str
    copy_gb_per_s_rank: float  # bytes read and written by `copy_`, all ranks at a time: the mean of the ranks
    copy_gb_per_s_total: float  # the same, the sum of the ranks
    link_bit_per_s: float | None  # of the simulated hosts' links; None where no link was shaped
    flow_bit_per_s: float | None  # cap of one connection, likewise
    rounds: int
    min_time_ms: float  # the least time that a cell was measured for
    # error of the cost model, and so of the simulator: |predicted - measured| / measured over the cells, from the links
    # that the deepytorch backend measured; None if no links were used
    median_prediction_error: float | None = None
    topology: dict[str, Any] | None = None
    links: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommResult(Record):
    """The result of `deepytorch bench comm`."""

    cells: list[CommCell]
    summary: CommSummary


def read_comm_result(path: Path) -> CommResult:
    """Read a result file. Raises `DataError` when it cannot be read or has another layout."""
    return read_result(CommResult, path)
