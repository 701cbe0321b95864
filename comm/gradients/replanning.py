"""Replanning of buckets from the first backwards: rank 0 makes the plan from its profile, and all ranks take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist

from deepytorch.comm.gradients.arrival_times import ArrivalTimes, fitted
from deepytorch.comm.gradients.buckets import NOMINAL, Bucket, BucketPlan, expected_arrivals, plan_buckets
from deepytorch.comm.gradients.sparse_rows import saves
from deepytorch.comm.topology.cost import Link


class Phase(Enum):
    """The purpose of the next or running backward. A backward that is reduced to its end starts the next phase."""

    PARTS = 0  # finds out which gradients come in parts; buckets are sent at the end
    ALONE = 1  # times each gradient's arrival and the network, each alone; buckets are sent at the end
    OVERLAPPED = 2  # times arrivals while buckets are being sent, as both share cores or a GPU
    SETTLED = 3  # measures nothing: the plan stays

    @property
    def holds_back(self) -> bool:
        """Return whether buckets are sent when the backward ends, and not when they are full."""
        return self in (Phase.PARTS, Phase.ALONE)


class Replanner:
    """Profiles the first backwards of one reducer, and makes its plans from the profiles."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, link: Link, bucket_bytes: int | None, may_send_rows: bool
    ) -> None:
        """Begin with phase `PARTS`.

        link: the assumed time of an all-reduce. bucket_bytes: the size that the user wants; None to have it chosen.
        """
        self.phase = Phase.PARTS
        self.times: ArrivalTimes | None = None  # of the running backward, if it is profiled
        self._group, self._device, self._bucket_bytes, self._may_send_rows = group, device, bucket_bytes, may_send_rows
        self._assumed = self._seen = link
        self._rows_seen: dict[int, tuple[int, bool]] = {}  # bytes of a gradient's rows, and whether they were the whole
        self._tables: dict[int, bool] = {}

    def begin(self) -> None:
        """Start a backward that is reduced."""
        self.times = None if self.phase is Phase.SETTLED else ArrivalTimes(self._device)

    def saw_rows(self, member: int, num_bytes: int, only: bool) -> None:
        """Record that a gradient has arrived as rows. `only`: the rows are the whole gradient."""
        if self.times is not None:
            self._rows_seen[member] = num_bytes, only

    def saw_network(self, buckets: Sequence[Bucket], seconds: float) -> None:
        """Record the seconds that these buckets took, one after the other and with nothing else running."""
        self._seen = fitted(self._assumed, sum(each.num_bytes for each in buckets), len(buckets), seconds)

    def forget(self) -> None:
        """Drop the times of the backward, which has ended in any way."""
        self.times = None

    def next_plan(self, plan: BucketPlan, times: ArrivalTimes) -> BucketPlan | None:
        """Return the plan that follows from a reduced backward, or None to keep `plan`: a collective.

        times: of that backward, which ran under `plan`.
        """
        showed, self.phase = self.phase, Phase(self.phase.value + 1)
        if showed is Phase.PARTS:
            return None
        said = ""
        if dist.get_rank(self._group) == 0:
            backward_us, members = times.backward_us(), plan.members
            fixed = torch.are_deterministic_algorithms_enabled()
            if fixed:  # the plan must be the same in every run
                self._seen = NOMINAL
                backward_us = NOMINAL.time_us(sum(member.num_bytes for member in members))
            if showed is Phase.ALONE:
                self._tables = self._worth_rows(plan)
            arrivals = times.arrivals(len(members), without_rows=self._tables)
            if fixed:
                order = [member for arrival in arrivals for member in arrival.members]
                arrivals = expected_arrivals(members, backward_us, order)
            made = plan_buckets(
                members,
                arrivals,
                self._seen,
                backward_us,
                bucket_bytes=self._bucket_bytes,
                measured=True,
                tables=self._tables,
            )
            said = json.dumps(made.choices())
        return plan.with_choices(json.loads(_from_rank_0(self._group, said, self._device)))

    def _worth_rows(self, plan: BucketPlan) -> dict[int, bool]:
        """Return the gradients to be sent as rows, and for each whether the rows are the whole gradient."""
        if not self._may_send_rows:
            return {}
        num_ranks, on_device = dist.get_world_size(self._group), self._device.type != "cpu"
        return {
            member: only
            for member, (num_bytes, only) in self._rows_seen.items()
            if saves(num_bytes, plan.members[member].num_bytes, self._seen, num_ranks, on_device=on_device)
        }


def _from_rank_0(group: dist.ProcessGroup, text: str, device: torch.device) -> str:
    """Return `text` of the group's rank 0 on every rank: a collective.

    The message does not go through the store, which ends with the process that holds it: rank 0 may have ended when a
    slow rank reads.
    """
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    count = torch.tensor([content.numel()], device=device)
    dist.broadcast(count, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        content = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return bytes(content.tolist()).decode()
