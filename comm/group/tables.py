"""The tables of a group: the algorithm that its native backend runs for each size, as predicted or as measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice, DeviceKind, OperationKind
from deepytorch.comm.algorithms.select import Range, collective, table
from deepytorch.comm.group.groups import Group, group_of
from deepytorch.comm.topology.calibrate import STREAMS, connections_of
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology

_WITHOUT_END = (1 << 64) - 1

Rows = list[tuple[int, str, int, int, str]]  # as the native backend takes them; the largest size of a row first

Tables = dict[tuple[OperationKind, DeviceKind, bool], Rows]


def tables_of(group: Group) -> Tables:
    """Return the native backend's choices, by kind, device and whether they are for deterministic sums.

    Only algorithms that can run on this group's hosts are considered.
    """
    topology, options = group.topology, group.options
    found: Tables = {}
    devices: tuple[DeviceKind, ...] = ("cpu", "cuda")
    for device, fixed in itertools.product(devices, (False, True)):
        links = Links() if fixed else group.links  # completed by formula, the same in every run
        ranges_of = {} if options.algorithm else table(topology, links, device=device, allow_compress=options.compress)
        for kind in KINDS:
            rows: Rows = []
            if options.algorithm is not None:
                choice = Choice(options.algorithm, options.chunk_bytes, max(1, options.num_streams), options.compress)
                rows = for_every_size(_possible(choice, kind, topology, group.shares, device))
            elif device == "cpu":  # GPUs use nccl until `measure` has found another algorithm to be faster
                rows = _rows(group, kind, device, ranges_of[kind])
            found[kind, device, fixed] = rows
    return found


def _rows(group: Group, kind: OperationKind, device: DeviceKind, ranges: Sequence[Range]) -> Rows:
    rows = []
    for index, entry in enumerate(ranges):
        end = ranges[index + 1].from_bytes - 1 if index + 1 < len(ranges) else _WITHOUT_END
        rows.append((end, *_settings(_possible(entry.choice, kind, group.topology, group.shares, device))))
    return rows


def _possible(choice: Choice, kind: OperationKind, topology: Topology, shares: bool, device: DeviceKind) -> Choice:
    """Return `choice` if this group can run it, else the engine. shares: whether the ranks of a host share memory."""
    algorithm = collective(choice.algorithm)
    runs = (shares or not algorithm.in_memory) and algorithm.unavailable(kind, device, topology) is None
    return choice if runs else Choice("engine")


def for_every_size(choice: Choice) -> Rows:
    """Return the rows of a table that has one choice for all sizes."""
    return [(_WITHOUT_END, *_settings(choice))]


def _settings(choice: Choice) -> tuple[str, int, int, str]:
    return choice.algorithm, choice.chunk_bytes, choice.num_streams, choice.compress or "exact"


def num_streams_of(group: Group, tables: Tables, has_cuda: bool) -> int:
    """Return the number of connections to other hosts that the tables may use: rank 0's number, so that all connect."""
    if group.topology.num_hosts == 1:
        return 0
    if has_cuda and group.options.algorithm is None:
        return max(STREAMS)  # `measure` may choose more than is predicted
    if group.rank == 0:
        used = (row[3] for rows in tables.values() for row in rows)
        group.store.set("streams", str(max([1, *used, *map(connections_of, group.links.times_us)])))
    group.store.wait(["streams"], group.timeout)
    return min(max(STREAMS), int(group.store.get("streams")))


def set_measured(group: Group, device: DeviceKind, tables: Mapping[OperationKind, Sequence[Range]]) -> None:
    """Make the group run the algorithms that were measured to be fastest. Every rank sets the same tables."""
    for kind, ranges in tables.items():
        group.backend.set_table(kind, device == "cuda", _rows(group, kind, device, ranges), False)


def with_remembered(group: Group) -> Group:
    """Return `group`, set to the choices that rank 0 remembers from `deepytorch.comm.measure` on these GPUs."""
    if group.rank == 0:
        found = measured.remembered(group.topology, group.gpus)
        group.store.set("measured", json.dumps(None if found is None else measured.to_json(found)))
    group.store.wait(["measured"], group.timeout)
    content = json.loads(group.store.get("measured"))
    if content is None:
        return group
    found = measured.from_json(content)
    set_measured(group, "cuda", found.tables)
    return replace(group, registered_from=found.registered_from)


def chosen(
    group: dist.ProcessGroup | None = None,
    kind: str = "all_reduce",
    num_bytes: int = 1 << 20,
    device: str = "cpu",
) -> Choice:
    """Return the algorithm and the settings with which the group runs a payload of `num_bytes`."""
    _, algorithm, chunk_bytes, num_streams, wire = group_of(group).backend.chosen(kind, device == "cuda", num_bytes)
    return Choice(algorithm, chunk_bytes, num_streams, None if wire == "exact" else wire)
