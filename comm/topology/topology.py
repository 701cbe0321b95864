"""The topology of a group: which ranks run on which hosts, and the hosts' hardware.

A topology is discovered, exchanged, or read from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch.comm.topology.checked_json import as_count, as_list, as_object, read_file
from deepytorch.comm.topology.host import Host
from deepytorch.errors import CommunicationError, DataError

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "deepytorch/topology"
_ALL = f"{_KEY}/all"
_DIGEST_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class Topology:
    """The hosts of a group, and for each rank the index of its host.

    No result depends on the order in which the hosts are listed, nor on whether the ranks of a host are contiguous.
    """

    hosts: tuple[Host, ...]
    host_of: tuple[int, ...]  # rank -> index into `hosts`

    def __post_init__(self) -> None:
        """Raise `DataError` for ranks on absent hosts, and for hosts without a rank or with the same id."""
        used = set(self.host_of)
        wrong = sorted(used - set(range(len(self.hosts))))
        if wrong or not self.host_of:
            found = f"names the hosts {wrong}" if wrong else "is empty"
            raise DataError(f"host_of {found}, expected for each rank an index below {len(self.hosts)}.")
        idle = sorted(set(range(len(self.hosts))) - used)
        if idle:
            raise DataError(f"The hosts {idle} have no rank. Leave them out, or name them in host_of.")
        ids = [host.id for host in self.hosts]
        if len(set(ids)) != len(ids):
            repeated = sorted({host_id for host_id in ids if ids.count(host_id) > 1})
            raise DataError(f"The host ids {repeated} occur more than once, expected each host once.")

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return len(self.host_of)

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.hosts)

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of one host, ascending."""
        return self._ranks_on[host]

    def local_rank(self, rank: int) -> int:
        """Return the place of `rank` among the ranks of its host, from 0."""
        return self.ranks_on(self.host_of[rank]).index(rank)

    @cached_property
    def is_regular(self) -> bool:
        """Return whether every host has the same number of ranks, contiguous or not."""
        return len({len(ranks) for ranks in self._ranks_on}) == 1

    @cached_property
    def ranks_per_host(self) -> int:
        """Return the number of ranks of the host with the most."""
        return max(len(ranks) for ranks in self._ranks_on)

    @property
    def ring_exits(self) -> int:
        """Return the number of hops of a ring in rank order that leave the same host.

        The host with the most such hops counts; 0 on one host.
        """
        return max(self._exits)

    @property
    def ring_crossings(self) -> int:
        """Return the number of hops of a ring in rank order that go from one host to another."""
        return sum(self._exits)

    @cached_property
    def digest(self) -> str:
        """Return a short sha256 of everything, including host ids.

        The digests of two ranks are equal exactly when their topologies agree.
        """
        return _sha256({"hosts": [host.to_json() for host in self._by_first_rank.hosts], "host_of": self._canonical})

    @cached_property
    def shape_digest(self) -> str:
        """Return a short sha256 of the shape.

        Ids and names are left out, so that the digest outlives a reboot and fits equal machines.
        """
        hosts = [replace(host, id="", name="").to_json() for host in self._by_first_rank.hosts]
        return _sha256({"hosts": hosts, "host_of": self._canonical})

    def to_json(self) -> dict[str, Any]:
        """Return the topology as plain JSON values."""
        return {"hosts": [host.to_json() for host in self.hosts], "host_of": list(self.host_of)}

    @staticmethod
    def from_json(content: Any) -> Topology:
        """Return the topology that a JSON value holds.

        A host may carry `count`, the number of such hosts (the ids then end in their number). `ranks_per_host` may
        replace `host_of`: that many ranks on each host, contiguous.

        Raises:
            DataError: the value has another layout.
        """
        values = as_object(content, "the topology", ("hosts",), ("host_of", "ranks_per_host"))
        if ("host_of" in values) == ("ranks_per_host" in values):
            raise DataError("The topology has both or none of host_of and ranks_per_host, expected one of them.")
        hosts: list[Host] = []
        for at, entry in enumerate(as_list(values["hosts"], "hosts of the topology")):
            hosts += _hosts_of_entry(entry, f"host {at}")
        if "host_of" in values:
            listed = as_list(values["host_of"], "host_of")
            host_of = tuple(as_count(index, f"host_of[{rank}]") for rank, index in enumerate(listed))
        else:
            per_host = as_count(values["ranks_per_host"], "ranks_per_host", 1)
            host_of = tuple(index for index in range(len(hosts)) for _ in range(per_host))
        return Topology(tuple(hosts), host_of)

    @cached_property
    def host_kinds(self) -> tuple[Host, ...]:
        """Return the hosts that differ in more than id and name, without these.

        A thousand equal machines are one kind.
        """
        return tuple(dict.fromkeys(replace(host, id="", name="") for host in self.hosts))

    @cached_property
    def _exits(self) -> tuple[int, ...]:
        exits = [0] * self.num_hosts
        for rank, host in enumerate(self.host_of):
            exits[host] += host != self.host_of[(rank + 1) % self.num_ranks]
        return tuple(exits)

    @cached_property
    def _ranks_on(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, host in enumerate(self.host_of):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))

    @cached_property
    def _by_first_rank(self) -> Topology:
        order = sorted(range(self.num_hosts), key=lambda host: self.ranks_on(host)[0])
        place = {host: at for at, host in enumerate(order)}
        return Topology(tuple(self.hosts[host] for host in order), tuple(place[host] for host in self.host_of))

    @property
    def _canonical(self) -> list[int]:
        return list(self._by_first_rank.host_of)


def read_topology(path: Path) -> Topology:
    """Read a topology file.

    Raises:
        DataError: the file cannot be read or has another layout.
    """
    try:
        return Topology.from_json(read_file(path, "topology file"))
    except DataError as error:
        if str(path) in str(error):
            raise
        raise DataError(f"{path}: {error}") from error


def scaled_topology(topology: Topology, num_ranks: int) -> Topology:
    """Return `topology` with `num_ranks` ranks: hosts x ranks per host, contiguous, the last host repeated as needed.

    Fewer ranks than one host has give one host with these ranks.

    Raises:
        DataError: hosts would be filled in part, or the hosts have different numbers of ranks.
    """
    if not topology.is_regular:
        raise DataError("The hosts of the topology have different numbers of ranks, expected one number to scale by.")
    per_host = topology.ranks_per_host
    if num_ranks < 1 or (num_ranks > per_host and num_ranks % per_host):
        raise DataError(
            f"{num_ranks} ranks do not fill hosts of {per_host} ranks. Ask for a multiple of {per_host}, or for fewer."
        )
    return regular_topology(topology.hosts, max(1, num_ranks // per_host), min(per_host, num_ranks))


def regular_topology(hosts: Sequence[Host], num_hosts: int, ranks_per_host: int) -> Topology:
    """Return the first `num_hosts` of `hosts`, the last one repeated as needed, with contiguous ranks on each."""
    extra = [replace(hosts[-1], id=f"{hosts[-1].id}+{number}") for number in range(1, num_hosts - len(hosts) + 1)]
    host_of = tuple(host for host in range(num_hosts) for _ in range(ranks_per_host))
    return Topology((*hosts[:num_hosts], *extra), host_of)


def from_all(store: dist.Store, key: str, rank: int, size: int, timeout: timedelta, mine: Any) -> list[Any]:
    """Return the JSON values of all `size` ranks of a group, in their order."""
    store.set(f"{key}/{rank}", json.dumps(mine))
    keys = [f"{key}/{peer}" for peer in range(size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(each)) for each in keys]


def gather_topology(store: dist.Store, rank: int, size: int, host: Host, timeout: timedelta) -> Topology:
    """Exchange the hosts of `size` ranks through `store`; every rank returns an equal topology.

    Values are JSON under `deepytorch/topology/`: pass a separate `PrefixStore` for each group. Rank 0 reads all values
    and publishes the result, so that a store serves few reads for many ranks. Hosts are listed by their lowest rank. If
    ranks of one host describe it differently, the description with the most GPUs counts (of the lowest such rank).

    Raises:
        CommunicationError: some ranks, which the error names, sent nothing within `timeout`.
    """
    store.set(f"{_KEY}/{rank}", json.dumps(host.to_json()))
    keys = [f"{_KEY}/{peer}" for peer in range(size)]
    try:
        store.wait(keys if rank == 0 else [_ALL], timeout)
    except Exception as error:
        raise CommunicationError(
            f"{_silent(store, keys)} did not describe their host within {timeout.total_seconds():g} s, expected all "
            f"{size} ranks to. See whether they died or are still starting; a longer timeout waits for them."
        ) from error
    if rank != 0:
        return Topology.from_json(json.loads(store.get(_ALL)))
    topology = _topology_of([store.get(key) for key in keys])
    store.set(_ALL, json.dumps(topology.to_json()))
    return topology


def _silent(store: dist.Store, keys: Sequence[str]) -> str:
    try:
        silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except Exception:
        return "Some ranks (the store no longer answers which)"
    return f"Ranks {', '.join(silent[:8])}{' and more' if len(silent) > 8 else ''}" if silent else "Some ranks"


def _topology_of(described: Sequence[bytes]) -> Topology:
    read = {content: Host.from_json(json.loads(content)) for content in set(described)}
    hosts = [read[content] for content in described]
    order = {host_id: at for at, host_id in enumerate(dict.fromkeys(host.id for host in hosts))}
    best = tuple(_best([host for host in hosts if host.id == host_id]) for host_id in order)
    return Topology(best, tuple(order[host.id] for host in hosts))


def _best(descriptions: Sequence[Host]) -> Host:
    return max(descriptions, key=lambda host: len(host.gpus))


def _hosts_of_entry(entry: Any, where: str) -> list[Host]:
    if not isinstance(entry, dict) or "count" not in entry:
        return [Host.from_json(entry, where)]
    count = as_count(entry["count"], f"{where}, count", 1)
    host = Host.from_json({key: value for key, value in entry.items() if key != "count"}, where)
    return [replace(host, id=f"{host.id}-{number}") for number in range(count)]


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
