"""The costs of a group's links, measured on its own connections and shared memory before algorithms are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms.base import Choice
from deepytorch.comm.algorithms.select import table
from deepytorch.comm.group.areas import area_bytes
from deepytorch.comm.group.groups import Group, set_links
from deepytorch.comm.group.inner_backends import Streams
from deepytorch.comm.group.rendezvous import same_everywhere, share_segment
from deepytorch.comm.group.tables import for_every_size, set_measured
from deepytorch.comm.topology import calibrate
from deepytorch.comm.topology.calibrate import STREAMS, Bench, calibrated
from deepytorch.comm.topology.cost import Links


def links_of(group: Group, module: Any, cpu: Any, streams: Streams) -> Links:
    """Return the measured or remembered links; empty if no choice depends on them. All ranks call this together."""
    if group.options.links is not None:
        return group.options.links
    if group.topology.num_ranks == 1 or group.options.algorithm is not None:
        return Links()

    def prepare() -> Bench:
        local = _local_backend(group, module) if group.shares and group.topology.ranks_per_host > 1 else None
        store = dist.PrefixStore("measuring", group.store)
        if not same_everywhere(store, group.topology, group.rank, local is not None, group.timeout):
            local = None  # shared memory is measured on every host or on none
        return _bench(group, cpu, streams.up_to(max(STREAMS)), local)

    return calibrated(prepare, group.topology, group.store, group.rank, group.timeout)


def try_again(group: Group, name: str, num_connections: int) -> None:
    """Make the native backend time its algorithms again among its collectives: [Note: trials] in backend.h.

    Args:
        group: one whose hosts have equally many ranks, which share memory if a host has several.
        name: the name of the process group.
        num_connections: the number of connections of each rank to other hosts.
    """
    backend, group = group.backend, replace(group, backend=None)  # `tried`, which the backend holds, must not hold it
    known = group.links.times_us
    in_memory = group.topology.ranks_per_host > 1
    expected = calibrate.to_try(group.links, group.topology, in_memory, num_connections)
    timed = [(way, size) for way, times in expected.items() for size in times]
    found: calibrate.Times = {}
    num_trials = 0

    def tried(backend: Any, copy_us: float, times_us: Sequence[float]) -> None:
        nonlocal found, num_trials
        now: dict[str, dict[int, float]] = {"copy": {calibrate.TRIAL_COPY_BYTES: copy_us}}
        for (way, size), time_us in zip(timed, times_us, strict=True):
            now.setdefault(way, {})[size] = time_us
        found, num_trials = calibrate.fastest(found, now), num_trials + 1
        links = calibrate.fitted(calibrate.tried_again(known, found, num_trials), group.topology)
        ranges = table(group.topology, links, allow_compress=group.options.compress)
        set_measured(replace(group, backend=backend), "cpu", ranges)
        set_links(name, links)
        calibrate.remember(group.topology, links, group.rank)

    backend.set_trials(
        rows=[(size, *_as_row(way)) for way, size in timed],
        expected_us=[expected[way][size] for way, size in timed],
        copy_bytes=calibrate.TRIAL_COPY_BYTES,
        first=calibrate.FIRST_TRIAL,
        number=calibrate.NUM_TRIALS,
        share=calibrate.TRIAL_SHARE,
        tried=tried,
    )


def _as_row(way: str) -> tuple[str, int, int, str]:
    """Return the native backend's row for the algorithm that calibration times under that name."""
    algorithms = {"engine": "engine", "memory": "shared_memory"}
    return algorithms.get(way, "streams"), 0, max(1, calibrate.connections_of(way)), "exact"


def _local_backend(group: Group, module: Any) -> Any | None:
    """Return a native backend among the ranks of this host, to measure shared memory; None without a segment."""
    host = group.topology.host_of[group.rank]
    local_rank, num_ranks = group.topology.local_rank(group.rank), len(group.topology.ranks_on(host))
    store = dist.PrefixStore(f"calibration/{host}", group.store)
    size = area_bytes(group.topology, 3, num_ranks)
    segment = share_segment(module, store, local_rank, num_ranks, 3, size, group.timeout)
    if segment is None:
        return None
    local = module.Backend(
        rank=local_rank,
        size=num_ranks,
        timeout_ms=int(group.timeout.total_seconds() * 1000),
        cpu=None,
        cuda=None,
        segment=segment,
        between=[],
        num_hosts=1,
        host=0,
        ranks=list(range(num_ranks)),
    )
    for fixed in (False, True):
        local.set_table("all_reduce", False, for_every_size(Choice("shared_memory")), fixed)
    return local


def _bench(group: Group, cpu: Any, between: Sequence[Any], local: Any | None) -> Bench:
    def engine(tensor: torch.Tensor) -> None:
        cpu.allreduce([tensor], dist.AllreduceOptions()).wait()

    def memory(tensor: torch.Tensor) -> None:
        assert local is not None
        local.allreduce([tensor], dist.AllreduceOptions()).wait()

    def across(tensor: torch.Tensor, connections: int) -> None:
        parts = tensor.chunk(2 * connections if connections > 1 else 1)
        works = [
            between[index % connections].allreduce([part], dist.AllreduceOptions()) for index, part in enumerate(parts)
        ]
        for work in works:
            work.wait()

    def agree(numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        largest = dist.AllreduceOptions()
        largest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        cpu.allreduce([tensor], largest).wait()
        return [float(number) for number in tensor]

    return Bench(group.topology, engine, memory if local is not None else None, across if between else None, agree)
