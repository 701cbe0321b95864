"""What this group's links cost, measured in under two seconds when the group is made, and remembered by topology.

[Note: slow moments] Noise only adds, but it may last as long as a measurement does, and what is remembered is chosen
by for good. So what counts is the fastest of rounds that are spread: over the sizes and ways of a first measurement,
over a run (`tried_again`), and over runs. A line through what was not all disturbed alike may cost nothing a byte, or
less than memory takes to copy one: that is no measurement. Where a whole run comes to twice what is remembered, the
machine has changed, and that run's own times count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.topology.cost import Link, LinkName, Links, fit_link, hop_link
from deepytorch.comm.topology.nominal import complete, scaled_links
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
_COPY_PART = 0.25  # of what a copy from memory takes: no collective takes less a byte, though caches are faster
_MISS = 2.0  # times what is remembered
_VERSION = 4  # of what is remembered

# Of trials among the group's own collectives: what is timed, after how many, and how often.
TRIAL_SIZES, TRIAL_COPY_BYTES, FIRST_TRIAL, NUM_TRIALS = _SIZES, _COPY_BYTES, 64, 5
_TRIALS_TO_JUDGE_BY = 3

Times = Mapping[str, Mapping[int, float]]  # us, by what was timed and its payload bytes: `Links.times_us`


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
    if known is not None:
        _MEASURED.append((topology, known))
        return known
    links = measure(prepare())
    remember(topology, links, rank)
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
    for measured_on, links in reversed(_MEASURED):
        if measured_on.shape_digest == topology.shape_digest:
            return links
    for measured_on, links in reversed(_MEASURED):
        if {host.id for host in topology.hosts} <= {host.id for host in measured_on.hosts}:
            return scaled_links(links, measured_on, topology, "cpu")
    return _remembered(_path(topology)) if Environment.read().remember_links else None


def measure(bench: Bench) -> Links:
    """Measure the links; every rank of the group has to call it, and all get the same numbers."""
    topology = bench.topology
    if topology.num_hosts == 1:
        return fitted(_times_on_one_host(bench), topology)
    copy_s = min(_slowest_copies(bench))
    fit = partial(_fit, bench, 1e6 * _COPY_PART * copy_s / _COPY_BYTES, complete(Links(), topology, "cpu"))
    links = Links(copy_bytes_per_s=topology.ranks_per_host * _COPY_BYTES / copy_s)
    if bench.memory is not None:
        links = replace(links, memory=fit("memory", bench.memory, _SIZES))
    links = replace(links, engine=fit("engine", bench.engine, (_SMALL, _worth(bench, bench.engine, 1 << 23))))
    if bench.between is None:
        return links
    return replace(links, network=_network(bench, bench.between, fit))


def fitted(times_us: Times, topology: Topology) -> Links:
    """The links of one host, from what was timed there: the same from the same times."""
    copy_us = times_us["copy"][_COPY_BYTES]
    least = _COPY_PART * copy_us / _COPY_BYTES
    assumed = complete(Links(), topology, "cpu")

    def line(name: LinkName) -> Link | None:
        return _line(times_us[name], least, assumed.link(name)) if name in times_us else None

    return Links(
        engine=line("engine"),
        memory=line("memory"),
        copy_bytes_per_s=1e6 * topology.ranks_per_host * _COPY_BYTES / copy_us,
        times_us=times_us,
    )


def tried_again(known: Times, found: Times, num_trials: int) -> Times:
    """What counts after `num_trials` in this run, the fastest of which took `found`: see the note on slow moments."""
    larger = {name: max(times) for name, times in found.items()}
    misses = any(found[name][size] > _MISS * known.get(name, {}).get(size, math.inf) for name, size in larger.items())
    return found if misses and num_trials >= _TRIALS_TO_JUDGE_BY else fastest(known, found)


def fastest(times_us: Times, others: Times) -> Times:
    """The shorter of the two times of everything that was timed."""
    return {
        name: {
            size: min(each[name][size] for each in (times_us, others) if size in each.get(name, {}))
            for size in sorted({*times_us.get(name, {}), *others.get(name, {})})
        }
        for name in sorted({*times_us, *others})
    }


def of_trial(numbers: Sequence[float]) -> Times:
    """The times that the native backend hands over after a trial."""
    memory, engine = numbers[0:-1:2], numbers[1:-1:2]
    return {
        "memory": dict(zip(TRIAL_SIZES, memory, strict=True)),
        "engine": dict(zip(TRIAL_SIZES, engine, strict=True)),
        "copy": {TRIAL_COPY_BYTES: numbers[-1]},
    }


def remember(topology: Topology, links: Links, rank: int) -> None:
    """Let later groups of this process, and on rank 0 those of later runs, begin with these links."""
    _MEASURED.append((topology, links))
    if rank == 0:
        _remember(_path(topology), links)


def _line(times_us: Mapping[int, float], least_us_per_byte: float, assumed: Link) -> Link:
    """The line through times of which each is the fastest of its size; where that is none, the largest size tells most.

    A payload takes no longer than a larger one does.
    """
    sizes = sorted(times_us)
    rising = [min(times_us[larger] for larger in sizes if larger >= size) for size in sizes]
    link = fit_link(sizes, rising)
    if link.us_per_byte >= least_us_per_byte:
        return link
    latency_us = min(assumed.latency_us, rising[0])
    return Link(latency_us, max(least_us_per_byte, (rising[-1] - latency_us) / sizes[-1]))


def _times_on_one_host(bench: Bench) -> Times:
    """The fastest rounds of the slowest rank, those of one size apart from each other."""
    runs = [("engine", bench.engine)] + ([] if bench.memory is None else [("memory", bench.memory)])
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for name, _ in runs for size in _SIZES}
    for number in range(-1, _ROUNDS):  # the first one does not count
        for name, run in runs:
            for size in _SIZES:
                found = _round(bench, run, size, _IN_A_ROW if size <= 1 << 16 else 1)
                if number >= 0:
                    seconds[name, size].append(found)
    times: dict[str, dict[int, float]] = {"copy": {_COPY_BYTES: 1e6 * min(_slowest_copies(bench))}}
    for (name, size), rounds in seconds.items():
        times.setdefault(name, {})[size] = 1e6 * min(bench.agree(rounds))
    return times


def _network(bench: Bench, between: Callable[[torch.Tensor, int], None], fit: Callable[..., Link]) -> dict[int, Link]:
    """A hop between hosts for each number of streams that leave one, up to where more of them gain nothing."""
    per_host, hosts = bench.topology.ranks_per_host, bench.topology.num_hosts
    found: dict[int, Link] = {}
    last: Link | None = None
    for connections in STREAMS:

        def run(tensor: torch.Tensor, connections: int = connections) -> None:
            between(tensor, connections)

        size = _worth(bench, run, 1 << 22)
        link = fit("engine", run, (_SMALL, size))
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


def _fit(
    bench: Bench,
    least_us_per_byte: float,
    assumed: Links,
    name: LinkName,
    run: Callable[[torch.Tensor], None],
    sizes: Sequence[int],
) -> Link:
    times_us = {size: _time_us(bench, run, size, _ROUNDS) for size in sizes}
    return _line(times_us, least_us_per_byte, assumed.link(name))


def _time_us(bench: Bench, run: Callable[[torch.Tensor], None], num_bytes: int, rounds: int) -> float:
    """The fastest round of the slowest rank, after one that does not count where it is short: noise only adds."""
    short = num_bytes <= _SMALL
    found = [_round(bench, run, num_bytes) for _ in range(rounds + short)]
    return 1e6 * min(bench.agree(found[short:]))


def _round(bench: Bench, run: Callable[[torch.Tensor], None], num_bytes: int, times: int = 1) -> float:
    """Seconds of one. Short operations are timed in a row: ranks that leave one begin the next together."""
    tensor = torch.zeros(num_bytes // 4)

    def several() -> None:
        for _ in range(times):
            run(tensor)

    bench.agree([0.0])  # all begin together
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
