"""The layout of a result file of `deepytorch bench comm`, checked when it is written and when it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from deepytorch.bench.json_results import is_number, match_fields, read_json, require, write_json

T = TypeVar("T")

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
class CommCell:
    """One op of one size in one arm. GB are 1e9 bytes; a time is the slowest rank's, per collective.

    `bytes` is the larger side: the output of all_gather, the input of reduce_scatter. A barrier moves none.
    """

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
        _check_fields(self, "cell")
        for name, known in (("op", OPS), ("dtype", DTYPES), ("redop", (*REDOPS, NO_REDOP))):
            require(getattr(self, name) in known, "cell", name, getattr(self, name), f"one of {', '.join(known)}")
        for name in ("bytes", "ranks", "hosts", "time_us", "iterations"):
            require(getattr(self, name) > 0, "cell", name, getattr(self, name), "above 0")
        quartiles = self.time_us_quartiles
        require(
            len(quartiles) == 3 and quartiles == sorted(quartiles) and quartiles[0] >= 0,
            *("cell", "time_us_quartiles", quartiles, "three times, ascending"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRatio:
    """The ratios of one cell. None: not measured, or without a meaning for the op."""

    op: str
    arm: str
    bytes: int
    ratio_vs_gloo: float | None  # gloo's time / the arm's: above 1 is faster
    # all_reduce on one host: 2 x bytes (read once, written once) / time / copy bandwidth of a rank
    copy_efficiency: float | None

    def __post_init__(self) -> None:
        """Raise `DataError` for a value that no run can give."""
        _check_fields(self, "ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommSummary:
    """The ratio of every cell, and the machine and links that were measured."""

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

    def __post_init__(self) -> None:
        """Raise `DataError` for a value that no run can give."""
        _check_fields(self, "summary")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommResult:
    """The result of `deepytorch bench comm`."""

    cells: list[CommCell]
    summary: CommSummary

    @staticmethod
    def from_json(content: Any) -> CommResult:
        """Return the result that the JSON value `content` holds. Raises `DataError` for another layout."""
        match_fields(content, CommResult, "result")
        match_fields(content["summary"], CommSummary, "summary")
        cells = _read_each(content["cells"], CommCell, "cell")
        ratios = _read_each(content["summary"]["ratios"], CommRatio, "ratio")
        return CommResult(cells=cells, summary=CommSummary(**content["summary"] | {"ratios": ratios}))

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return asdict(self)


def read_comm_result(path: Path) -> CommResult:
    """Read a result file. Raises `DataError` when it cannot be read or has another layout."""
    return CommResult.from_json(read_json(path))


def write_comm_result(path: Path, result: CommResult) -> None:
    """Write `result` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    write_json(path, result.to_json())


def _read_each(content: Any, kind: Callable[..., T], what: str) -> list[T]:
    require(isinstance(content, list), "result", f"{what}s", type(content).__name__, "a list")
    made = []
    for entry in content:
        match_fields(entry, kind, what)
        made.append(kind(**entry))
    return made


def _check_fields(record: Any, what: str) -> None:
    for name, kind in get_type_hints(type(record)).items():
        value = getattr(record, name)
        if isinstance(kind, UnionType):
            if value is None:
                continue
            kind = get_args(kind)[0]  # every union here is "kind or null"
        if kind is str:
            require(isinstance(value, str), what, name, value, "text")
        elif kind is bool:
            require(isinstance(value, bool), what, name, value, "true or false")
        elif kind is int:
            require(is_number(value) and isinstance(value, int) and value >= 0, what, name, value, "a count")
        elif kind is float:
            require(is_number(value) and value >= 0, what, name, value, "a finite number, 0 or more")
        elif kind == list[float]:
            require(isinstance(value, list) and all(map(is_number, value)), what, name, value, "a list of numbers")
        elif kind == dict[str, Any]:
            require(isinstance(value, dict), what, name, type(value).__name__, "an object")
        else:
            require(isinstance(value, list), what, name, type(value).__name__, "a list")
