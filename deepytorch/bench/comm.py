"""`deepytorch bench comm`: the time of collectives over size, in the columns of nccl-tests, relative to gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from deepytorch.bench.comm_launch import found_by_ranks
from deepytorch.bench.comm_options import CommOptions
from deepytorch.bench.comm_schema import PREDICTED_OPS, CommCell, CommRatio, CommResult, CommSummary
from deepytorch.bench.comm_worker import CopyBandwidth, describe, measure
from deepytorch.bench.options import simulated_hosts
from deepytorch.bench.prediction import median_error, prediction_errors
from deepytorch.bench.rank_process import torchrun_rank
from deepytorch.bench.results import machine
from deepytorch.bench.shaping import parse_rate
from deepytorch.comm.algorithms.base import Choice
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.discover import discover_host
from deepytorch.comm.topology.topology import Topology, scaled_topology
from deepytorch.errors import ConfigError

WORKER = (sys.executable, "-m", "deepytorch.bench.comm_worker")


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

    def keep(record: dict[str, Any]) -> None:
        if "cells" in record:
            found = [CommCell(**cell) for cell in record["cells"]]
            cells.extend(found)
            on_cells(found)

    lab = simulated_hosts(options)
    copied = CopyBandwidth(**found_by_ranks(options, options.ranks, lab, worker, notify, keep))
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
    if in_place:
        with torchrun_rank(options.timeout_s):
            found = describe(options)
    else:
        asked = replace(options, explain=True)
        found = found_by_ranks(asked, options.ranks, simulated_hosts(options), WORKER, notify)
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

    with torchrun_rank(options.timeout_s) as rank:
        copied = measure(options, keep, notify if rank == 0 else lambda text: None)
    if rank != 0:
        return None
    given = [None if text is None else parse_rate(text) for text in (options.rate, options.flow_rate)]
    return _result(options, cells, copied, *given)


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
        machine=machine(),
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
    links = Links.from_json(copied.measured_by["links"])
    return median_error(prediction_errors(known, topology, links)) if known else None
