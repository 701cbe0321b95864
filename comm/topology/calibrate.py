"""Calibration: the cost of a group's links, measured in under two seconds when the group is made, and then cached.

[Note: slow moments] Noise only adds time, but may last as long as a measurement, and the cached result decides choices
for good. The links are therefore fitted to the fastest of rounds that are spread: over the sizes and ways of a first
measurement, over a run (`tried_again`), and over runs. A line through times that were not all disturbed alike may cost
nothing per byte, or less than memory takes to copy a byte: such a line is no measurement. If a whole run takes twice
the cached times, the machine has changed, and that run's own times count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.topology.cost import Link, LinkName, Links, all_reduce_link, fit_link, hop_link
from deepytorch.comm.topology.nominal import complete, scaled_links
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import Environment
from deepytorch.errors import DataError
from deepytorch.private_files import cache_directory, read_private_json, write_private_json

STREAMS = (1, 2, 4, 8)  # numbers of connections of one rank that are tried
_SIZES = (1 << 10, 1 << 16, 1 << 22)  # within one host
# Between hosts: one size for latency, and for the rate one that takes about this long.
_SMALL, _LARGE_SECONDS = 1 << 14, 0.1
_LEAST_LARGE, _MOST_LARGE, _MOST_LARGE_OF_A_RANK = 1 << 19, 1 << 23, 1 << 22
_LOOK = 1 << 18  # the size whose time is the first to predict the larger size
_ROUNDS, _IN_A_ROW = 3, 16
_SHORT = 1 << 16  # sizes up to this are run several times in a row, within one host
_NO_GAIN = 0.9  # more streams count as a gain only below this part of the time
_COPY_BYTES = 1 << 23
_COPY_PART = 0.25  # part of a copy's time: no collective takes less per byte, although caches are faster
_MISS = 2.0  # a run this many times slower than the cached times shows another machine
_MOST_LATENCY = 0.1  # of a payload between hosts that takes its time: the part of it that latency may be
_TAKES_ITS_TIME_US = 25e3  # on fast networks the large size has reached its limit sooner, and latency adds to it
_VERSION = 7  # version of the cached files

# Trials among the group's own collectives: size of their copy, number of collectives before the first, number of
# trials, and the part of the time that trials may take.
TRIAL_COPY_BYTES, FIRST_TRIAL, NUM_TRIALS, TRIAL_SHARE = _COPY_BYTES, 64, 12, 0.01
_TRIALS_TO_JUDGE_BY = 3

Times = Mapping[str, Mapping[int, float]]  # us, by the name of what was timed and its payload bytes: `Links.times_us`
_Run = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Bench:
    """The operations that calibration may run. Each call returns when it is done, and every rank makes it.

    Attributes:
        topology: that of the group.
        engine: the inner backend's all-reduce of the whole group.
        memory: the all-reduce among the ranks of one host; None if they share no memory.
        between: the all-reduce of each rank's tensor with its fellows on the other hosts, over the same number of
            connections from every rank; None on one host.
        agree: returns the largest of every rank's numbers, equal on all ranks.
    """

    topology: Topology
    engine: _Run
    memory: _Run | None
    between: Callable[[torch.Tensor, int], None] | None
    agree: Callable[[Sequence[float]], list[float]]


_MEASURED: list[tuple[Topology, Links]] = []  # by this process: subgroups do not measure their network again


def calibrated(
    prepare: Callable[[], Bench], topology: Topology, store: dist.Store, rank: int, timeout: timedelta
) -> Links:
    """Return the links of `topology`, the same on all ranks: rank 0's knowledge of them, else measured by `prepare()`.

    Rank 0 knows what this process measured, on these hosts or on more of them, and what its cache holds.
    """
    if rank == 0:
        known = _known(topology)
        store.set("links", json.dumps(None if known is None else known.to_json()))
    store.wait(["links"], timeout)
    content = json.loads(store.get("links"))
    if content is not None:
        links = Links.from_json(content)
        _MEASURED.append((topology, links))
        return links
    links = measure(prepare())
    remember(topology, links, rank)
    return links


def _path(topology: Topology) -> Path:
    return cache_directory() / "links" / f"{topology.shape_digest}-{_VERSION}.json"


def _known(topology: Topology) -> Links | None:
    for measured_on, links in reversed(_MEASURED):
        if measured_on.shape_digest == topology.shape_digest:
            return links
    for measured_on, links in reversed(_MEASURED):
        if {host.id for host in topology.hosts} <= {host.id for host in measured_on.hosts}:
            return scaled_links(links, measured_on, topology, "cpu")
    return _remembered(_path(topology)) if Environment.read().remember_links else None


def measure(bench: Bench) -> Links:
    """Measure the links; every rank of the group has to call this function, and all get the same numbers."""
    return fitted(_times(bench), bench.topology)


def fitted(times_us: Times, topology: Topology) -> Links:
    """Return the links, fitted to the times. Equal times give equal links."""
    copy_us = times_us["copy"][_COPY_BYTES]
    assumed = complete(Links(), topology, "cpu")
    least = _COPY_PART * copy_us / _COPY_BYTES

    def line(name: LinkName) -> Link | None:
        between = name == "engine" and topology.num_hosts > 1
        return _line(times_us[name], least, assumed.link(name), between) if name in times_us else None

    return Links(
        engine=line("engine"),
        memory=line("memory"),
        network=_network(times_us, topology, least, assumed.link("engine")),
        copy_bytes_per_s=1e6 * topology.ranks_per_host * _COPY_BYTES / copy_us,
        times_us=times_us,
    )


def to_try(links: Links, topology: Topology, in_memory: bool, num_connections: int) -> Times:
    """Return the names and sizes that a trial times, with the expected us.

    A trial times the sizes that were timed before; without such times, the sizes that are predicted to be worth it.
    in_memory: whether the ranks of a host share memory. num_connections: of each rank to its fellows on other hosts.
    """
    known, per_host, hosts = complete(links, topology, "cpu"), topology.ranks_per_host, topology.num_hosts
    expected = {"engine": known.link("engine")} | ({"memory": known.link("memory")} if in_memory else {})
    for connections in STREAMS:
        if connections <= num_connections:
            hop = known.network_link(per_host * connections)
            expected[over_network(connections)] = all_reduce_link(hop, hosts).scaled(rate=per_host)
    sizes = {
        name: _SIZES if hosts == 1 or name == "memory" else (_SMALL, _large(name, link.us_per_byte))
        for name, link in expected.items()
    }
    return {
        name: links.times_us.get(name) or {size: link.time_us(size) for size in sizes[name]}
        for name, link in expected.items()
    }


def over_network(connections: int) -> str:
    """Return the name in `Times` of all-reduces between hosts.

    Each local rank runs one, over `connections` connections.
    """
    return f"network/{connections}"


def connections_of(name: str) -> int:
    """Return the number of connections of the all-reduces of that name; 0 for other names."""
    return int(name.removeprefix("network/")) if name.startswith("network/") else 0


def tried_again(known: Times, found: Times, num_trials: int) -> Times:
    """Return the times that count after `num_trials` trials in this run: see the note on slow moments.

    found: the fastest times of this run.
    """
    larger = {name: max(times) for name, times in found.items()}
    misses = any(found[name][size] > _MISS * known.get(name, {}).get(size, math.inf) for name, size in larger.items())
    return found if misses and num_trials >= _TRIALS_TO_JUDGE_BY else fastest(known, found)


def fastest(times_us: Times, others: Times) -> Times:
    """Return the shorter of the two times of everything that was timed."""
    return {
        name: {
            size: min(each[name][size] for each in (times_us, others) if size in each.get(name, {}))
            for size in sorted({*times_us.get(name, {}), *others.get(name, {})})
        }
        for name in sorted({*times_us, *others})
    }


def remember(topology: Topology, links: Links, rank: int) -> None:
    """Let later groups of this process, and on rank 0 those of later runs, start with these links."""
    _MEASURED.append((topology, links))
    if rank == 0:
        write_private_json(_path(topology), links.to_json())


def _line(times_us: Mapping[int, float], least_us_per_byte: float, assumed: Link, between_hosts: bool = False) -> Link:
    """Return the line through times, each of which is the fastest of its size.

    The larger of two payloads sets the upper limit of the smaller one's time. If there is no valid line, the largest
    size determines the rate. Between hosts a large payload that takes its time hides what small ones wait for: ranks
    that share cores are scheduled while bytes travel. A line with all of that latency would be faster than the wire, so
    that latency is a part of the large one's time at the most, and the rate is what reproduces it.
    """
    sizes = sorted(times_us)
    rising = [min(times_us[larger] for larger in sizes if larger >= size) for size in sizes]
    link = fit_link(sizes, rising)
    if link.us_per_byte < least_us_per_byte:
        latency_us = min(assumed.latency_us, rising[0])
        return Link(latency_us, max(least_us_per_byte, (rising[-1] - latency_us) / sizes[-1]))
    most_us = _MOST_LATENCY * rising[-1]
    if not between_hosts or link.latency_us <= most_us or rising[-1] < _TAKES_ITS_TIME_US:
        return link
    return Link(most_us, (rising[-1] - most_us) / sizes[-1])


def _network(times_us: Times, topology: Topology, least_us_per_byte: float, assumed: Link) -> dict[int, Link]:
    """Return a hop between hosts for each number of streams that leave a host, as long as more streams gain."""
    per_host, hosts = topology.ranks_per_host, topology.num_hosts
    found: dict[int, Link] = {}
    last: Link | None = None
    for connections, link in _between(times_us, least_us_per_byte, assumed).items():
        # every local rank sends its own tensor: together the tensors are the payload of one host
        found[per_host * connections] = hop_link(link.scaled(rate=1 / per_host), hosts)
        if last is not None and not _gains(link, last):
            break
        last = link
    return found


def _between(times_us: Times, least_us_per_byte: float, assumed: Link) -> dict[int, Link]:
    """Return the all-reduce of one local rank of each host, for each number of connections that was timed."""
    numbers = sorted(filter(None, map(connections_of, times_us)))
    return {number: _line(times_us[over_network(number)], least_us_per_byte, assumed, True) for number in numbers}


def _gains(more: Link, fewer: Link) -> bool:
    return more.us_per_byte <= _NO_GAIN * fewer.us_per_byte


def _times(bench: Bench) -> Times:
    """Return all times that the links are fitted to. More connections are tried as long as they gain."""
    times: dict[str, Mapping[int, float]] = {"copy": {_COPY_BYTES: 1e6 * min(_slowest_copies(bench))}}
    runs = {"engine": bench.engine} | ({} if bench.memory is None else {"memory": bench.memory})
    if bench.between is None:
        return times | _fastest_rounds(bench, runs)
    for connections in STREAMS:
        runs[over_network(connections)] = _over(bench.between, connections)
        if connections == STREAMS[0]:  # timed in the same rounds as the next number, with which it is compared
            continue
        times |= _fastest_rounds(bench, runs, times.get(over_network(STREAMS[0]), {}))
        runs = {}
        *_, fewer, more = _between(times, 0.0, Link(0.0, 0.0)).values()
        if not _gains(more, fewer):
            break
    return times


def _over(between: Callable[[torch.Tensor, int], None], connections: int) -> _Run:
    return lambda tensor: between(tensor, connections)


def _fastest_rounds(
    bench: Bench, runs: Mapping[str, _Run], of_one_connection: Collection[int] = ()
) -> dict[str, dict[int, float]]:
    """Return the fastest rounds of the slowest rank, in us. Rounds of one size are spread over time.

    of_one_connection: the sizes that were timed over one connection, for more of them, with which it is compared.
    """
    hosts = bench.topology.num_hosts
    sizes: dict[str, Collection[int]] = {}
    for name, run in runs.items():
        known = (sizes.get(over_network(STREAMS[0])) or of_one_connection) if connections_of(name) else ()
        sizes[name] = known or _sizes(bench, name, run)
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes[name]} for name in runs}
    for number in range(-1, _ROUNDS):  # round -1 is a warm-up; sizes that take long skip it
        for name, run in runs.items():
            for size in sizes[name]:
                if number < 0 and size > _SHORT:
                    continue
                several = size <= _SHORT and (hosts == 1 or name == "memory")
                found = _round(bench, run, size, _IN_A_ROW if several else 1)
                if number >= 0:
                    seconds[name][size].append(found)
    return {
        name: {size: 1e6 * min(bench.agree(rounds)) for size, rounds in of_name.items()}
        for name, of_name in seconds.items()
    }


def _sizes(bench: Bench, name: str, run: _Run) -> Sequence[int]:
    """Return the sizes to be timed for that name."""
    if bench.topology.num_hosts == 1 or name == "memory":
        return _SIZES
    large = _LOOK
    while True:  # a small payload's time is mostly latency, so that the next look may allow for more
        found = _large(name, 1e6 * bench.agree([_round(bench, run, large)])[0] / large)
        if found <= large:
            return _SMALL, max(_LEAST_LARGE, found)
        large = found


def _large(name: str, us_per_byte: float) -> int:
    """Return the size to be timed between hosts for the rate, given the approximate time of a byte."""
    most = _MOST_LARGE_OF_A_RANK if connections_of(name) else _MOST_LARGE
    worth = int(_LARGE_SECONDS * 1e6 / us_per_byte) if us_per_byte > 0 else most
    return min(most, max(_LEAST_LARGE, 1 << (worth.bit_length() - 1)))


def _round(bench: Bench, run: _Run, num_bytes: int, times: int = 1) -> float:
    """Return the seconds of one operation.

    Short operations are timed in a row: ranks that leave one operation begin the next together.
    """
    tensor = torch.zeros(num_bytes // 4)

    def several() -> None:
        for _ in range(times):
            run(tensor)

    bench.agree([0.0])  # all ranks begin together
    return _seconds(several) / times


def _slowest_copies(bench: Bench) -> list[float]:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return bench.agree([_seconds(lambda: target.copy_(source)) for _ in range(3)])


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _remembered(path: Path) -> Links | None:
    content = read_private_json(path)
    try:
        return None if content is None else Links.from_json(content)
    except DataError:
        return None
