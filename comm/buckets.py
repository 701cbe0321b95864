"""Which gradients travel together: a plan of buckets, made of parameters and links only, alike on every rank.

Gradients come out of the backward one after the other. A bucket can leave when its last gradient is there, and buckets
leave one after the other; what is not on its way when the backward ends is exposed. Small buckets start early and end
early but pay the latency often, so sizes are chosen by the predicted exposed time, under the alpha-beta model of `cost`
and a backward whose time is spread over the parameters by their number of elements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.backend import group_of
from deepytorch.comm.base import DeviceKind, Operation
from deepytorch.comm.cost import Link, fit_link
from deepytorch.comm.select import predict_us, select
from deepytorch.errors import ConfigError

_NOMINAL = Link(100.0, 2 * 8e6 / 10e9)  # us, and us per byte: a ring sends nearly twice the payload
_FITTED_BYTES = (1 << 18, 1 << 21, 1 << 24, 1 << 27)

# Sizes that are tried for all buckets but the first and the last, which may be smaller.
_BODY_BYTES = tuple(1 << power for power in range(18, 28))  # 256 KB .. 128 MB
_EDGE_PARTS = (1, 2, 4, 8)  # how many times smaller than the others the first and the last bucket may be
_ALIGN = 64  # bytes: a bucket's members begin at cache lines, as the kernels like them


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter's gradient: `name` as in `named_parameters`, `dtype` such as "float32"."""

    name: str
    dtype: str
    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient, without padding."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that are reduced by one collective.

    members: their places in the plan's `members`. offsets: where each begins in the buffer, in elements. num_elements:
    of the whole buffer, what lies between members included.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they leave, and what they were chosen by.

    `exposed_us`: predicted communication after the end of a backward of `backward_us`, out of `total_us`.
    """

    members: tuple[Member, ...]
    buckets: tuple[Bucket, ...]
    backward_us: float
    exposed_us: float
    total_us: float

    def digest(self) -> str:
        """SHA-256 of members and buckets: equal on ranks that may reduce together."""
        shape = [
            [[each.name, each.dtype, each.num_elements] for each in self.members],
            [list(bucket.members) for bucket in self.buckets],
        ]
        return hashlib.sha256(json.dumps(shape, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Sizes and predictions as plain JSON values."""
        return {
            "parameters": len(self.members),
            "bucket_bytes": [bucket.num_bytes for bucket in self.buckets],
            "predicted_communication_ms": self.total_us / 1e3,
            "predicted_exposed_ms": self.exposed_us / 1e3,
        }

    def bucket_of(self) -> tuple[int, ...]:
        """The bucket of each member."""
        found = [0] * len(self.members)
        for number, bucket in enumerate(self.buckets):
            for member in bucket.members:
                found[member] = number
        return tuple(found)


def all_reduce_link(group: dist.ProcessGroup) -> Link:
    """What an all-reduce costs on a group: as its links were measured, else as over a 10 Gbit network."""
    try:
        found = group_of(group)
    except ConfigError:
        return _NOMINAL
    device: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
    times = []
    for size in _FITTED_BYTES:
        operation = Operation("all_reduce", size, device=device)
        choice = select(operation, found.topology, found.links)
        times.append(predict_us(operation, found.topology, found.links, choice))
    return fit_link(_FITTED_BYTES, times)


def plan_buckets(
    members: Sequence[Member], order: Sequence[int], link: Link, backward_us: float, bucket_bytes: int | None = None
) -> BucketPlan:
    """The plan with the least predicted exposed time.

    order: the members as their gradients are expected, each once. link: time of the all-reduce of a payload.
    backward_us: expected time of the whole backward. bucket_bytes: one size for all buckets in place of the choice.
    Raises `ConfigError` where `order` is not an order of the members.
    """
    if sorted(order) != list(range(len(members))):
        raise ConfigError(f"an order of {len(order)} gradients for {len(members)} parameters; expected each once")
    if bucket_bytes is not None:
        candidates = [(bucket_bytes, 1, 1)]
    else:
        candidates = [(body, first, last) for body in _BODY_BYTES for first in _EDGE_PARTS for last in _EDGE_PARTS]
    best: BucketPlan | None = None
    seen: set[tuple[Bucket, ...]] = set()
    for body, first, last in candidates:
        buckets = _cut(members, order, body, body // first, body // last)
        if buckets in seen:
            continue
        seen.add(buckets)
        exposed_us = _exposed_us(members, buckets, link, backward_us)
        if best is None or exposed_us < best.exposed_us:
            total_us = sum(link.time_us(bucket.num_bytes) for bucket in buckets)
            best = BucketPlan(tuple(members), buckets, backward_us, exposed_us, total_us)
    assert best is not None
    return best


def _cut(
    members: Sequence[Member], order: Sequence[int], body_bytes: int, first_bytes: int, last_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets of about those sizes, a new one where the dtype changes."""
    left = sum(members[member].num_bytes for member in order)
    groups: list[list[int]] = []
    filled = 0
    for member in order:
        size = members[member].num_bytes
        room = first_bytes if len(groups) <= 1 else body_bytes
        ends = left <= last_bytes < left + filled  # what is left is the last bucket
        if not groups or members[groups[-1][-1]].dtype != members[member].dtype or filled + size > room or ends:
            if not groups or groups[-1]:
                groups.append([])
            filled = 0
        groups[-1].append(member)
        filled += size
        left -= size
    return tuple(_bucket(members, group) for group in groups)


def _bucket(members: Sequence[Member], group: Sequence[int]) -> Bucket:
    offsets, end = [], 0
    element_bytes = members[group[0]].element_bytes
    step = max(1, _ALIGN // element_bytes)
    for member in group:
        offsets.append(end)
        end += -(-members[member].num_elements // step) * step
    return Bucket(tuple(group), tuple(offsets), members[group[0]].dtype, end, end * element_bytes)


def _exposed_us(members: Sequence[Member], buckets: Sequence[Bucket], link: Link, backward_us: float) -> float:
    """Communication after the end of the backward: each bucket starts when it is full and the one before has left."""
    num_elements = sum(member.num_elements for member in members) or 1
    done, free_us = 0, 0.0
    for bucket in buckets:
        done += sum(members[member].num_elements for member in bucket.members)
        free_us = max(free_us, backward_us * done / num_elements) + link.time_us(bucket.num_bytes)
    return max(0.0, free_us - backward_us)
