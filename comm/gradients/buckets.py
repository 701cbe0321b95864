"""Planning of buckets (gradients sent together) from parameters, arrivals and links; the same on every rank.

Gradients come out of the backward one after the other. A bucket can be sent when its last gradient is there, and
buckets are sent one after the other. Communication after the end of the backward is exposed. Small buckets start early
and end early but pay the latency often. The best cuts are found exactly, under the alpha-beta model of `cost`, by
dynamic programming over the arrivals (the problem of merged-gradient wait-free backpropagation: Shi, Chu and Li 2019,
"MG-WFBP"). Of plans that end at about the same time, the one with the fewest buckets is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms.base import DeviceKind, Operation
from deepytorch.comm.algorithms.select import predict_us, select
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.topology.cost import Link, fit_link
from deepytorch.errors import ConfigError

NOMINAL = Link(100.0, 2 * 8e6 / 10e9)  # us, and us per byte at 10 Gbit/s: a ring sends nearly twice the payload
_FITTED_BYTES = (1 << 18, 1 << 21, 1 << 24, 1 << 27)

# Compute and communication share cores, or a GPU, so each may take longer than measured. Buckets are cut for both: for
# a slow backward, which needs small last buckets, and for slow links, which need early first buckets.
_LATE, _SLOW = 1.5, 1.5
_MAX_GROUPS = 64  # of gradients that arrive about together; a finer plan gains nothing noticeable
_TOLERANCE = 0.01  # part of the whole communication that fewer buckets may cost
_ALIGN = 64  # bytes: a bucket's members begin at cache lines, which suits the kernels


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter's gradient: `name` as in `named_parameters`, `dtype` such as "float32"."""

    name: str
    dtype: str
    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the gradient, without padding."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that are reduced by one collective.

    Attributes:
        members: their places in the plan's `members`.
        offsets: where each member begins in the buffer, in elements.
        num_bytes: of the whole buffer, including the space between members.
        as_rows: the only member is reduced as `rows`, and as a whole only in a step in which some rank has the whole
            gradient.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    as_rows: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """Gradients that arrive at one time of the backward, in us from its beginning."""

    members: tuple[int, ...]
    at_us: float


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they are sent, and the facts that they were chosen by.

    Attributes:
        exposed_us: predicted communication after the end of a backward of `backward_us`, out of `total_us`, without
            that of rows.
        measured: whether arrivals and links were measured in a backward, and not assumed.
        tables: members whose rows are exchanged at the end: those whose buckets are `as_rows`, and others of which a
            part arrived as a whole before.
    """

    members: tuple[Member, ...]
    buckets: tuple[Bucket, ...]
    backward_us: float
    exposed_us: float
    total_us: float
    measured: bool = False
    tables: tuple[int, ...] = ()

    def digest(self) -> str:
        """Return the SHA-256 of members and buckets: equal on ranks that may reduce together."""
        shape = [
            [[each.name, each.dtype, each.num_elements] for each in self.members],
            [list(bucket.members) for bucket in self.buckets],
        ]
        return hashlib.sha256(json.dumps(shape, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return sizes and predictions as plain JSON values."""
        return {
            "parameters": len(self.members),
            "bucket_bytes": [bucket.num_bytes for bucket in self.buckets],
            "predicted_communication_ms": self.total_us / 1e3,
            "predicted_exposed_ms": self.exposed_us / 1e3,
            "measured": self.measured,
            "as_rows": [self.members[member].name for member in self.tables],
        }

    def choices(self) -> dict[str, Any]:
        """Return the choices from which `with_choices` makes a plan of the same members on other ranks.

        The choices are plain JSON values.
        """
        return {
            "buckets": [[list(bucket.members), bucket.as_rows] for bucket in self.buckets],
            "tables": list(self.tables),
            "us": [self.backward_us, self.exposed_us, self.total_us],
        }

    def with_choices(self, choices: dict[str, Any]) -> BucketPlan:
        """Return the measured plan of another rank."""
        buckets = tuple(_bucket(self.members, group, as_rows) for group, as_rows in choices["buckets"])
        tables = tuple(choices["tables"])
        backward_us, exposed_us, total_us = choices["us"]
        return BucketPlan(self.members, buckets, backward_us, exposed_us, total_us, measured=True, tables=tables)

    def bucket_of(self) -> tuple[int, ...]:
        """Return the bucket of each member."""
        found = [0] * len(self.members)
        for number, bucket in enumerate(self.buckets):
            for member in bucket.members:
                found[member] = number
        return tuple(found)


def group_link(group: dist.ProcessGroup) -> Link:
    """Return the cost of an all-reduce on a group: by its measured links, else as over a 10 Gbit network.

    One rank alone sends nothing, which no line describes; its buckets are planned as over a network.
    """
    try:
        found = group_of(group)
    except ConfigError:
        return NOMINAL
    if group.size() == 1:
        return NOMINAL
    device: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
    times = []
    for size in _FITTED_BYTES:
        operation = Operation("all_reduce", size, device=device)
        choice = select(operation, found.topology, found.links)
        times.append(predict_us(operation, found.topology, found.links, choice))
    return fit_link(_FITTED_BYTES, times)


def expected_arrivals(
    members: Sequence[Member], backward_us: float, order: Sequence[int] | None = None
) -> list[Arrival]:
    """Return arrivals for a backward without measured times: each gradient after a time proportional to its elements.

    order: None for the last member first.
    """
    left = total = sum(member.num_elements for member in members) or 1
    found = []
    for number in reversed(range(len(members))) if order is None else order:
        left -= members[number].num_elements
        found.append(Arrival((number,), backward_us * (total - left) / total))
    return found


def plan_buckets(
    members: Sequence[Member],
    arrivals: Sequence[Arrival],
    link: Link,
    backward_us: float,
    *,
    bucket_bytes: int | None = None,
    measured: bool = False,
    tables: Mapping[int, bool] | None = None,
) -> BucketPlan:
    """Return the plan whose last bucket is predicted to end first.

    Args:
        members: the gradients.
        arrivals: every member once, in the order of arrival.
        link: the time of the all-reduce of a payload.
        backward_us: the time of the whole backward.
        bucket_bytes: a size for all buckets in place of the choice.
        measured: whether arrivals and link were measured.
        tables: members whose rows are exchanged, and whether they arrive as nothing but rows.

    Raises:
        ConfigError: `arrivals` does not hold every member once.
    """
    order = [member for arrival in arrivals for member in arrival.members]
    if sorted(order) != list(range(len(members))):
        raise ConfigError(f"arrivals of {len(order)} gradients for {len(members)} parameters; expected each once")
    alone = [member for member, only in (tables or {}).items() if only]
    if alone:
        kept = [Arrival(tuple(m for m in each.members if m not in alone), each.at_us) for each in arrivals]
        arrivals = [each for each in kept if each.members]
        order = [member for member in order if member not in alone]
    if bucket_bytes is not None:
        ready = {member: arrival.at_us for arrival in arrivals for member in arrival.members}
        runs = _runs([members[member].num_bytes for member in order], bucket_bytes)
        pieces = [Arrival(tuple(order[start:end]), ready[order[end - 1]]) for start, end in runs]
    else:
        pieces = _merged(members, arrivals)
        late = [Arrival(piece.members, _LATE * piece.at_us) for piece in pieces]
        ends = _cuts(members, late, link) | _cuts(members, pieces, link.scaled(rate=_SLOW))
        pieces = [_joined(pieces[start:end]) for start, end in pairwise([0, *sorted(ends)])]
    buckets: list[Bucket] = []
    free_us = 0.0
    for piece in pieces:
        free_us = max(free_us, piece.at_us) + _cost_us(members, piece.members, link)
        buckets += [_bucket(members, group) for group in _by_dtype(members, piece.members)]
    total_us = sum(link.time_us(bucket.num_bytes) for bucket in buckets)
    exposed_us = max(0.0, free_us - backward_us)
    buckets += [_bucket(members, [member], as_rows=True) for member in alone]
    return BucketPlan(
        tuple(members), tuple(buckets), backward_us, exposed_us, total_us, measured, tuple(sorted(tables or {}))
    )


def _merged(members: Sequence[Member], arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Merge neighbouring arrivals until there are few enough to plan with."""
    total = sum(member.num_bytes for member in members)
    runs = _runs([_num_bytes(members, arrival.members) for arrival in arrivals], total / _MAX_GROUPS)
    return [_joined(arrivals[start:end]) for start, end in runs]


def _runs(sizes: Sequence[int], most: float) -> list[tuple[int, int]]:
    """Return starts and ends of runs of sizes, each as long as it can be with up to `most` bytes, or of one size."""
    starts: list[int] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not starts or filled + size > most:
            starts.append(place)
            filled = 0
        filled += size
    return list(pairwise([*starts, len(sizes)]))


def _joined(arrivals: Sequence[Arrival]) -> Arrival:
    members = tuple(member for arrival in arrivals for member in arrival.members)
    return Arrival(members, max(arrival.at_us for arrival in arrivals))


def _cuts(members: Sequence[Member], pieces: Sequence[Arrival], link: Link) -> set[int]:
    """Return the number of pieces after which each bucket ends: the fewest buckets that end about as early as any."""
    count = len(pieces)
    if not count:
        return set()
    cost = [[0.0] * (count + 1) for _ in range(count)]
    for start in range(count):
        kinds: set[str] = set()
        num_bytes = 0
        for end in range(start + 1, count + 1):
            kinds.update(members[member].dtype for member in pieces[end - 1].members)
            num_bytes += _num_bytes(members, pieces[end - 1].members)
            cost[start][end] = len(kinds) * link.latency_us + num_bytes * link.us_per_byte
    best = [0.0] * (count + 1)
    for end in range(1, count + 1):
        best[end] = min(max(best[start], pieces[end - 1].at_us) + cost[start][end] for start in range(end))
    ends = [[0.0] + [float("inf")] * count]  # [number of buckets][number of pieces]
    before: list[list[int]] = [[0] * (count + 1)]
    enough_us = best[count] + _TOLERANCE * cost[0][count]
    while ends[-1][count] > enough_us:
        last, now, chosen = ends[-1], [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                time = max(last[start], pieces[end - 1].at_us) + cost[start][end]
                if time < now[end]:
                    now[end], chosen[end] = time, start
        ends.append(now)
        before.append(chosen)
    cuts = set()
    end = count
    for chosen in reversed(before[1:]):
        cuts.add(end)
        end = chosen[end]
    return cuts


def _by_dtype(members: Sequence[Member], group: Sequence[int]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for member in group:
        found.setdefault(members[member].dtype, []).append(member)
    return list(found.values())


def _num_bytes(members: Sequence[Member], group: Sequence[int]) -> int:
    return sum(members[member].num_bytes for member in group)


def _cost_us(members: Sequence[Member], group: Sequence[int], link: Link) -> float:
    return sum(link.time_us(_num_bytes(members, part)) for part in _by_dtype(members, group))


def _bucket(members: Sequence[Member], group: Sequence[int], as_rows: bool = False) -> Bucket:
    offsets, end = [], 0
    element_bytes = members[group[0]].element_bytes
    step = max(1, _ALIGN // element_bytes)
    for member in group:
        offsets.append(end)
        end += -(-members[member].num_elements // step) * step
    return Bucket(tuple(group), tuple(offsets), end * element_bytes, as_rows)
