"""Transfer of buckets: filled in any order, sent in the plan's order, so that all ranks issue the same collectives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.gradients.arrival_times import finish
from deepytorch.comm.gradients.bucket_memory import BucketMemory, Buffers, Transfer
from deepytorch.comm.gradients.buckets import Bucket, BucketPlan
from deepytorch.comm.gradients.comm_hooks import CommHook
from deepytorch.comm.group.groups import averages
from deepytorch.comm.kernels.buckets import Slots, pack

_MOST_SLOTS = 256  # sets of gradients that arrived together; graphs hand over about 48


@dataclass
class Counts:
    """The counts of one reducer: `syncs` backwards that reduced, over how many `collectives` and `num_bytes`."""

    syncs: int = 0
    collectives: int = 0
    num_bytes: int = 0
    exposed_seconds: float = 0.0
    late: int = 0  # gradients that arrived from eager frames
    transfers: list[Transfer] = field(default_factory=list)  # of the last backward that reduced


class BucketSender:
    """The buckets of one plan, backward after backward.

    The first backward allocates the memory. Gradients that autograd holds from an earlier plan stay unchanged.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        hook: CommHook | None,
        counts: Counts,
    ) -> None:
        """Make the sender, without memory.

        parameters: those of the plan's members. hook: called with each bucket in place of an all-reduce.
        """
        self.plan, self.counts = plan, counts
        self._parameters, self._group, self._hook = parameters, group, hook
        self._bucket_of = plan.bucket_of()
        self._place = {member: place for bucket in plan.buckets for place, member in enumerate(bucket.members)}
        self._averages = averages(group)
        self._buffers = Buffers(group, parameters[0].device)
        self._memory: list[BucketMemory] = []
        self._slots: dict[tuple[int, ...], Slots] = {}  # by the gradients that arrived together; in this memory
        self._next = 0  # the bucket to be sent next

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients."""
        return self._parameters[0].device

    def begin(self) -> None:
        """Start a backward: no gradient has arrived."""
        if not self._memory:
            self._memory = self._make_all()
        for number, bucket in enumerate(self._memory):
            if bucket.is_held():  # the script kept a gradient of an earlier step, which must stay unchanged
                bucket = self._make(number, self._buffers.another(self.plan.buckets[number].num_bytes))
                self._memory[number] = bucket
                self._slots.clear()
            bucket.begin()
        self._next = 0

    def view(self, member: int) -> Tensor:
        """Return the place of a gradient in its bucket, in the layout of its parameter."""
        return self.memory_of(member).views[self._place[member]]

    def planned(self, member: int) -> Bucket:
        """Return a gradient's bucket in the plan."""
        return self.plan.buckets[self._bucket_of[member]]

    def memory_of(self, member: int) -> BucketMemory:
        """Return the memory of a gradient's bucket."""
        return self._memory[self._bucket_of[member]]

    def pack(self, members: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Copy gradients into their places, on a GPU by one launch for each type."""
        by_type: dict[torch.dtype, list[int]] = {}
        for place, member in enumerate(members):
            by_type.setdefault(self._parameters[member].dtype, []).append(place)
        for places in by_type.values():
            together = tuple(members[place] for place in places)
            if together not in self._slots:
                if len(self._slots) >= _MOST_SLOTS:
                    self._slots.clear()
                self._slots[together] = Slots([self.view(member) for member in together])
            pack([gradients[place] for place in places], self._slots[together])

    def fill(self, member: int) -> None:
        """Record that a gradient is in its place."""
        self.memory_of(member).missing -= 1

    def send_full(self) -> None:
        """Send full buckets, in the order of the plan."""
        whole = sum(not bucket.as_rows for bucket in self.plan.buckets)
        while self._next < whole and self._memory[self._next].missing == 0:
            self._launch(self._next)
            self._next += 1

    def send_now(self, member: int) -> None:
        """Send a gradient's bucket, and wait for it."""
        self._launch(self._bucket_of[member])
        self.wait([member])

    def send_one_by_one(self) -> float:
        """Send every bucket after the previous one has arrived; return the seconds that the network takes alone."""
        started = finish(self.device)
        for number, bucket in enumerate(self._memory):
            self._launch(number)
            self.counts.exposed_seconds += bucket.finish()
        self._next = len(self._memory)
        return finish(self.device) - started

    def wait(self, members: Iterable[int] | None = None) -> None:
        """Wait for the transfers of the buckets of these gradients (None: of all)."""
        numbers = range(len(self._memory)) if members is None else {self._bucket_of[each]: None for each in members}
        for number in numbers:
            self.counts.exposed_seconds += self._memory[number].finish()

    def sent_rows(self, member: int, num_bytes: int, began: float) -> float:
        """Record that the rows of a gradient were sent, and return the time of the transfer's end.

        Args:
            member: the gradient.
            num_bytes: the bytes that each rank sent.
            began: the time of the transfer's start.
        """
        number, ended = self._bucket_of[member], time.perf_counter()
        transfer = Transfer(number, num_bytes, began, ended, ended - began, began, as_rows=True)
        self._memory[number].rows = transfer
        self._count(num_bytes)
        self.counts.exposed_seconds += transfer.waited
        return ended

    def transfers(self) -> list[Transfer]:
        """Return the transfers of this backward."""
        sent = [transfer for bucket in self._memory for transfer in (bucket.transfer, bucket.rows)]
        return [transfer for transfer in sent if transfer is not None]

    def _launch(self, number: int) -> None:
        bucket, num_bytes = self._memory[number], self.plan.buckets[number].num_bytes
        bucket.transfer = transfer = Transfer(number, num_bytes, time.perf_counter())
        if self._hook is None:
            bucket.work = self._all_reduce(bucket.buffer)
        else:
            bucket.work = self._hook.start(bucket, number, number == len(self._memory) - 1)
        bucket.work.get_future().then(lambda _, transfer=transfer: setattr(transfer, "ended", time.perf_counter()))
        bucket.launched = True
        self._count(num_bytes)

    def _all_reduce(self, tensor: Tensor) -> Any:
        if not self._averages:
            tensor.div_(dist.get_world_size(self._group))
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        return dist.all_reduce(tensor, op, group=self._group, async_op=True)

    def _count(self, num_bytes: int) -> None:
        self.counts.collectives += 1
        self.counts.num_bytes += num_bytes

    def _make_all(self) -> list[BucketMemory]:
        """Make the memory of all buckets; all ranks do so at this point.

        Nothing else may refer to the memory: see `BucketMemory.is_held`.
        """
        buffers = self._buffers.for_all([bucket.num_bytes for bucket in self.plan.buckets])
        return [self._make(number, buffers.pop(0)) for number in range(len(self.plan.buckets))]

    def _make(self, number: int, buffer: Tensor) -> BucketMemory:
        planned = self.plan.buckets[number]
        return BucketMemory(planned, [self._parameters[member] for member in planned.members], buffer)
