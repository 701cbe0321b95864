"""`deepytorch bench comm`: the time of collectives over size, in the columns of nccl-tests, relative to gloo."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.bench.comm_launch import WORKER, RankError, run_ranks
from deepytorch.bench.comm_schema import (
    DTYPES,
    OPS,
    PREDICTED_OPS,
    REDOPS,
    CommCell,
    CommRatio,
    CommResult,
    CommSummary,
)
from deepytorch.bench.comm_worker import AUTO, CommArm, CommPlan, CopyBandwidth, describe, init_default_group, measure
from deepytorch.bench.lab import LabOptions
from deepytorch.bench.prediction import median_error, prediction_errors
from deepytorch.bench.shaping import parse_rate
from deepytorch.comm.algorithms.base import Choice, Compression
from deepytorch.comm.algorithms.select import COLLECTIVES
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.discover import discover_host
from deepytorch.comm.topology.topology import Topology, scaled_topology
from deepytorch.errors import ConfigError

BACKENDS = ("deepytorch", "gloo")
COMPRESS: dict[str, Compression | None] = {"none": None, "bf16": "bf16", "fp16": "fp16"}
MAX_SIZE_BYTES = 4 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """The options of the measurement: operations, sizes and ranks.

    Rates are as in `deepytorch lab`, for `hosts` above 1.
    """

    ranks: int = 2  # of each host
    hosts: int = 1
    rate: str | None = None
    flow_rate: str | None = None
    backends: tuple[str, ...] = BACKENDS
    sizes_bytes: tuple[int, ...] = (1 << 10, 1 << 20)
    dtype: str = "float32"
    ops: tuple[str, ...] = ("all_reduce",)
    redop: str = "sum"
    algorithms: tuple[str, ...] = (AUTO,)  # of the deepytorch backend, one arm each
    compress: tuple[str, ...] = ("none",)  # likewise
    allocated: bool = False  # one more arm for each arm of the deepytorch backend, with buffers from `comm.allocate`
    rounds: int = 5
    min_time_ms: float = 100.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run."""
        for name in ("ranks", "hosts", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1.")
        for name in ("min_time_ms", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number above 0.")
        if self.ranks * self.hosts < 2:
            raise ConfigError("There is one rank in all, expected at least 2: give --ranks 2.")
        if self.hosts == 1 and (self.rate or self.flow_rate):
            raise ConfigError("A rate shapes the links between hosts, and there is one host: give --hosts 2.")
        known = {
            "ops": OPS,
            "backends": BACKENDS,
            "algorithms": (AUTO, *(collective.name for collective in COLLECTIVES)),
            "compress": tuple(COMPRESS),
            "dtype": DTYPES,
            "redop": REDOPS,
        }
        for name, values in known.items():
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in values:
                    raise ConfigError(f'{name} has "{value}", expected one of {", ".join(values)}.')
        for name in ("ops", "backends", "compress", "algorithms", "sizes_bytes"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty, expected at least one.")
        if self.redop == "avg" and not getattr(torch, self.dtype).is_floating_point:
            raise ConfigError(f"The average of {self.dtype} has no exact result: take --redop sum or a float dtype.")
        of_ours = self.allocated or self.algorithms != (AUTO,) or self.compress != ("none",)
        if of_ours and "deepytorch" not in self.backends:
            raise ConfigError(
                f"backends has {', '.join(self.backends)} only, and algorithms, compress and allocated are of "
                "deepytorch: add it, or leave them out."
            )
        if self.backends.count("deepytorch") > 1:
            raise ConfigError("backends has deepytorch more than once: its arms are named by algorithms and compress.")

    def lab(self) -> LabOptions | None:
        """Return the requested simulated hosts, or None for one host. Raises `ConfigError`."""
        if self.hosts == 1:
            return None
        shape = LabOptions(hosts=self.hosts, ranks=self.ranks)
        return replace(shape, rate=self.rate or shape.rate, flow_rate=self.flow_rate)

    def plan(self) -> CommPlan:
        """Return what every rank measures."""
        return CommPlan(
            arms=self.arms(),
            ops=self.ops,
            sizes_bytes=self.sizes_bytes,
            dtype=self.dtype,
            redop=self.redop,
            hosts=self.hosts,
            rounds=self.rounds,
            min_time_ms=self.min_time_ms,
            timeout_s=self.timeout_s,
        )

    def arms(self) -> tuple[CommArm, ...]:
        """Return the arms in the order of the backends, each with its own name."""
        arms: list[CommArm] = []
        for backend in self.backends:
            if backend == "deepytorch":
                arms += [
                    CommArm(
                        name="+".join(
                            [
                                backend if algorithm == AUTO else f"{backend}:{algorithm}",
                                *([compress] if compress != "none" else []),
                                *(["allocated"] if allocated else []),
                            ]
                        ),
                        backend=backend,
                        algorithm=algorithm,
                        compress=COMPRESS[compress],
                        allocated=allocated,
                    )
                    for algorithm in self.algorithms
                    for compress in self.compress
                    for allocated in ((False, True) if self.allocated else (False,))
                ]
            else:
                before = sum(arm.backend == backend for arm in arms)
                arms.append(CommArm(name=f"{backend}#{before + 1}" if before else backend, backend=backend))
        return tuple(arms)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that `text` names: `1K:256M` (powers of two), `1K:256M:4` (a factor), `1K,3M`.

    K, M and G are 2**10, 2**20 and 2**30. Raises `ConfigError`.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ConfigError(
                f'The sizes "{part}" have {len(rest) + 1} parts, expected FIRST:LAST or FIRST:LAST:FACTOR.'
            )
        size = _parse_size(first)
        last = _parse_size(rest[0]) if rest else size
        factor = _parse_factor(rest[1]) if len(rest) == 2 else 2
        if last < size:
            raise ConfigError(f'The sizes "{part}" end below their beginning.')
        while size <= last:
            sizes.append(size)
            size *= factor
    return tuple(dict.fromkeys(sizes))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= MAX_SIZE_BYTES:
        raise ConfigError(f'The size is "{text}", expected bytes such as 512, 64K, 16M or 1G, at most 4G.')
    return size


def _parse_factor(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 2:
        raise ConfigError(f'The factor between sizes is "{text}", expected a whole number, 2 or more.')
    return int(text)


def run_comm(
    options: CommOptions,
    on_cells: Callable[[list[CommCell]], None] = lambda cells: None,
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> CommResult:
    """Start the ranks of `options` on this machine, measure, and end every rank however the measurement ends.

    `on_cells` gets the cells of one op and size, all arms, as soon as they are measured; `worker` is the command that
    each rank runs. Raises `RankError` when a rank fails or nothing happens for `timeout_s`.
    """
    cells: list[CommCell] = []
    copied: CopyBandwidth | None = None
    lab = options.lab()
    with contextlib.closing(run_ranks(options.plan(), options.ranks, lab, worker)) as records:
        for record in records:
            if "doing" in record:
                notify(record["doing"])
            elif "cells" in record:
                found = [CommCell(**cell) for cell in record["cells"]]
                cells += found
                on_cells(found)
            else:
                copied = CopyBandwidth(**record["done"])
    if copied is None:
        raise RankError("The ranks ended before the measurement was complete, and none of them says why.")
    return _result(options, cells, copied, lab.rate_bits_per_s if lab else None, lab.flow_bits_per_s if lab else None)


@dataclass(frozen=True, slots=True)
class Described:
    """The choices of groups of the deepytorch backend, and the topology and links behind them.

    `chosen[compress][op]` has a choice for each size. Links and choices are None if the native code cannot be built.
    """

    topology: Topology
    links: Links | None
    chosen: Mapping[str, Mapping[str, Sequence[Choice]]] | None


def describe_ranks(
    options: CommOptions, notify: Callable[[str], None] = lambda text: None, *, in_place: bool = False
) -> Described:
    """Start the ranks, or be one of torchrun's, and return the deepytorch backend's choices and their basis."""
    if "deepytorch" not in options.backends:
        raise ConfigError(f"backends has {', '.join(options.backends)} only, and deepytorch is what chooses: add it.")
    found: dict[str, Any] | None = None
    if in_place:
        init_default_group(options.timeout_s)
        try:
            found = describe(options.plan())
            dist.barrier()
        finally:
            dist.destroy_process_group()
    else:
        plan = replace(options.plan(), explain=True)
        with contextlib.closing(run_ranks(plan, options.ranks, options.lab())) as records:
            for record in records:
                if "doing" in record:
                    notify(record["doing"])
                found = record.get("done", found)
    if found is None:
        here = Topology((discover_host(),), (0,) * options.ranks)
        return Described(scaled_topology(here, options.ranks * options.hosts), None, None)
    chosen = {
        compress: {op: [Choice(**choice) for choice in choices] for op, choices in by_op.items()}
        for compress, by_op in found["chosen"].items()
    }
    return Described(Topology.from_json(found["topology"]), Links.from_json(found["links"]), chosen)


def run_in_place(
    options: CommOptions,
    on_cells: Callable[[list[CommCell]], None] = lambda cells: None,
    notify: Callable[[str], None] = lambda text: None,
) -> CommResult | None:
    """Measure as the rank that torchrun's environment names; return the result on rank 0, None on the others."""
    cells: list[CommCell] = []

    def keep(found: list[CommCell]) -> None:
        cells.extend(found)
        on_cells(found)

    init_default_group(options.timeout_s)
    try:
        rank = dist.get_rank()
        copied = measure(options.plan(), keep, notify if rank == 0 else lambda text: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return None
    given = [None if text is None else parse_rate(text) for text in (options.rate, options.flow_rate)]
    return _result(options, cells, copied, *given)


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def ranks_of_host(ranks: int | None, hosts: int, shape: tuple[int, int] | None) -> int:
    """Return the number of ranks of a host: `ranks`, or that of torchrun's `shape`. Raises `ConfigError` for both."""
    if shape is None:
        return 2 if ranks is None else ranks
    if ranks is not None or hosts > 1:
        raise ConfigError("torchrun has started the ranks (RANK is set): leave --ranks and --hosts out, or unset RANK.")
    return shape[0]


def torchrun_shape() -> tuple[int, int] | None:
    """Return (ranks of a host, hosts) when torchrun started this process, else None. Raises `ConfigError`."""
    if "RANK" not in os.environ:
        return None
    try:
        ranks = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK is set, but WORLD_SIZE or LOCAL_WORLD_SIZE is not a number ({error}). Start with torchrun, or unset "
            "RANK."
        ) from error
    return local, max(1, ranks // local)


def ratios(cells: Sequence[CommCell], copied: CopyBandwidth) -> list[CommRatio]:
    """Return the ratios of every cell to the first gloo arm's of the same op and size, and to a plain copy."""
    gloo = {(cell.op, cell.bytes): cell.time_us for cell in reversed(cells) if cell.backend == "gloo"}
    return [
        CommRatio(
            op=cell.op,
            arm=cell.arm,
            bytes=cell.bytes,
            ratio_vs_gloo=gloo[cell.op, cell.bytes] / cell.time_us if (cell.op, cell.bytes) in gloo else None,
            copy_efficiency=2 * cell.algbw / copied.rank if cell.op == "all_reduce" and cell.hosts == 1 else None,
        )
        for cell in cells
    ]


def _result(
    options: CommOptions, cells: list[CommCell], copied: CopyBandwidth, link: int | None, flow: int | None
) -> CommResult:
    summary = CommSummary(
        ratios=ratios(cells, copied),
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
        torch_version=torch.__version__,
        copy_gb_per_s_rank=copied.rank,
        copy_gb_per_s_total=copied.total,
        link_bit_per_s=None if link is None else float(link),
        flow_bit_per_s=None if flow is None else float(flow),
        rounds=options.rounds,
        min_time_ms=options.min_time_ms,
        median_prediction_error=_prediction_error(cells, copied),
        topology=(copied.measured_by or {}).get("topology"),
        links=(copied.measured_by or {}).get("links"),
    )
    return CommResult(cells=cells, summary=summary)


def _prediction_error(cells: Sequence[CommCell], copied: CopyBandwidth) -> float | None:
    if copied.measured_by is None:
        return None
    topology = Topology.from_json(copied.measured_by["topology"])
    known = [
        asdict(replace(cell, algorithm="engine" if cell.algorithm == "default" else cell.algorithm))
        for cell in cells
        if not cell.allocated and cell.algorithm != "delegated" and cell.op in PREDICTED_OPS
    ]
    return (
        None
        if not known
        else median_error(prediction_errors(known, topology, Links.from_json(copied.measured_by["links"])))
    )
