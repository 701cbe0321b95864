"""What this group's links cost, measured in under two seconds when the group is made, and remembered by topology."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.topology.cost import Link, Links, fit_link, hop_link
from deepytorch.comm.topology.nominal import scaled_links
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import Environment
from deepytorch.errors import DataError
from deepytorch.private_files import cache_directory, prepare_private, replace_file

STREAMS = (1, 2, 4, 8)  # connections of one rank that are tried
_SIZES = (1 << 10, 1 << 16, 1 << 22)  # on one host
_SMALL, _LARGE_SECONDS = (
    1 << 14,
    0.1,
)  # between hosts: one size for latency, one that takes about this long for the rate
_ROUNDS, _IN_A_ROW = 3, 16
_NO_GAIN = 0.9  # more streams have to take less than this part of the time
_COPY_BYTES = 1 << 23
_VERSION = 3  # of what is remembered


@dataclass(frozen=True)
class Bench:
    """What calibration may run; each call returns when it is done, and every rank makes it.

    engine: the inner backend's all-reduce of the whole group. memory: the all-reduce among the ranks of one host, None
    where they share none. between: the same number of connections from every rank to its fellows on the other hosts
    carry that rank's tensor, None on one host. agree: the largest of every rank's numbers, alike on all ranks.
    """

    topology: Topology
    engine: Callable[[torch.Tensor], None]
    memory: Callable[[torch.Tensor], None] | None
    between: Callable[[torch.Tensor, int], None] | None
    agree: Callable[[Sequence[float]], list[float]]


_MEASURED: list[tuple[Topology, Links]] = []  # by this process: parts of a group do not measure their network again


def calibrated(
    prepare: Callable[[], Bench], topology: Topology, store: dist.Store, rank: int, timeout: timedelta
) -> Links:
    """The links of `topology`, the same on all ranks: as `known_links`, else measured with `prepare()`."""
    known = known_links(topology, store, rank, timeout)
    links = measure(prepare()) if known is None else known
    _MEASURED.append((topology, links))
    if rank == 0 and known is None:
        _remember(_path(topology), links)
    return links


def known_links(topology: Topology, store: dist.Store, rank: int, timeout: timedelta) -> Links | None:
    """What rank 0 knows of the links of `topology`, the same on all ranks.

    It knows what this process measured, on these hosts or on more of them, and what its cache holds.
    """
    if rank == 0:
        known = _known(topology)
        store.set("links", json.dumps(None if known is None else known.to_json()))
    store.wait(["links"], timeout)
    content = json.loads(store.get("links"))
    return None if content is None else Links.from_json(content)


def _path(topology: Topology) -> Path:
    return cache_directory() / "links" / f"{topology.shape_digest}-{_VERSION}.json"


def _known(topology: Topology) -> Links | None:
    for measured_on, links in _MEASURED:
        if measured_on.shape_digest == topology.shape_digest:
            return links
    for measured_on, links in _MEASURED:
        if {host.id for host in topology.hosts} <= {host.id for host in measured_on.hosts}:
            return scaled_links(links, measured_on, topology, "cpu")
    return _remembered(_path(topology)) if Environment.read().remember_links else None


def measure(bench: Bench) -> Links:
    """Measure the links; every rank of the group has to call it, and all get the same numbers."""
    topology = bench.topology
    links = Links(copy_bytes_per_s=topology.ranks_per_host * _COPY_BYTES / _copy_seconds(bench))
    if bench.memory is not None:
        links = replace(links, memory=_fit(bench, bench.memory, _SIZES))
    if topology.num_hosts == 1:
        return replace(links, engine=_fit(bench, bench.engine, _SIZES))
    links = replace(links, engine=_fit(bench, bench.engine, (_SMALL, _worth(bench, bench.engine, 1 << 23))))
    if bench.between is None:
        return links
    return replace(links, network=_network(bench, bench.between))


def _network(bench: Bench, between: Callable[[torch.Tensor, int], None]) -> dict[int, Link]:
    """A hop between hosts for each number of streams that leave one, up to where more of them gain nothing."""
    per_host, hosts = bench.topology.ranks_per_host, bench.topology.num_hosts
    found: dict[int, Link] = {}
    last: Link | None = None
    for connections in STREAMS:

        def run(tensor: torch.Tensor, connections: int = connections) -> None:
            between(tensor, connections)

        size = _worth(bench, run, 1 << 22)
        link = _fit(bench, run, (_SMALL, size))
        # every local rank sends a tensor of its own: together they are the payload of one host
        found[per_host * connections] = hop_link(Link(link.latency_us, link.us_per_byte / per_host), hosts)
        if last is not None and link.us_per_byte > _NO_GAIN * last.us_per_byte:
            break
        last = link
    return found


def _worth(bench: Bench, run: Callable[[torch.Tensor], None], most: int) -> int:
    """A size that takes about `_LARGE_SECONDS`, from a first look at a middling one."""
    look = 1 << 18
    rate = _time_us(bench, run, look, 1) / look
    return min(most, 1 << max(19, int(_LARGE_SECONDS * 1e6 / rate).bit_length() - 1))


def _fit(bench: Bench, run: Callable[[torch.Tensor], None], sizes: Sequence[int]) -> Link:
    return fit_link(sizes, [_time_us(bench, run, size, _ROUNDS) for size in sizes])


def _time_us(bench: Bench, run: Callable[[torch.Tensor], None], num_bytes: int, rounds: int) -> float:
    """The fastest round of the slowest rank, after one that does not count where it is short: noise only adds.

    Short operations are timed in a row: ranks that leave one begin the next together.
    """
    tensor = torch.zeros(num_bytes // 4)
    short = num_bytes <= _SMALL or bench.topology.num_hosts == 1
    times = _IN_A_ROW if num_bytes <= 1 << 16 and bench.topology.num_hosts == 1 else 1

    def several() -> None:
        for _ in range(times):
            run(tensor)

    found = []
    for number in range(-1 if short else 0, rounds):
        bench.agree([0.0])  # all begin together
        seconds = _seconds(several) / times
        if number >= 0:
            found.append(seconds)
    return 1e6 * min(bench.agree(found))


def _copy_seconds(bench: Bench) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = [_seconds(lambda: target.copy_(source)) for _ in range(3)]
    return bench.agree([statistics.median(times)])[0]


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _remembered(path: Path) -> Links | None:
    if not path.exists() or any(prepare_private(folder) is not None for folder in (path.parent.parent, path.parent)):
        return None
    try:
        return Links.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, DataError):
        return None


def _remember(path: Path, links: Links) -> None:
    if any(prepare_private(folder) is not None for folder in (path.parent.parent, path.parent)):
        return
    try:
        replace_file(path, json.dumps(links.to_json()))
    except OSError:
        return
