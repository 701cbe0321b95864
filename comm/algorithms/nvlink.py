"""Collectives of GPUs that reach each other's memory through NVLink, over torch's symmetric memory.

Small all-reduces run as kernels, for low latency. Large ones run on copy engines, which leave the processors free for
computation. NCCL handles the sizes between. These algorithms have not yet run on several GPUs.
"""

from __future__ import annotations

from typing import ClassVar

from deepytorch.comm.algorithms.base import (
    Choice,
    Collective,
    DeviceKind,
    Operation,
    OperationKind,
    share_of_all_reduce,
)
from deepytorch.comm.topology.cost import Link, Links, ring_share
from deepytorch.comm.topology.topology import Topology

DTYPES = ("fp32", "bf16", "fp16")
REDUCE_OPS = ("sum", "avg")


class SymmetricMemory(Collective):
    """The common part of the variants. Limits are powers of two, so that a range of a table never goes past them.

    steps: of latency; a kernel's launch, a barrier before it and one after it are one step each.
    """

    device = "cuda"
    several_hosts = False
    ranks_of_a_host = (2, 8)
    kinds: ClassVar[tuple[OperationKind, ...]] = ("all_reduce",)
    steps: ClassVar[int]

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse GPUs without NVLink between any two too."""
        reason = super().unavailable(kind, device, topology)
        if reason is None and not topology.hosts[0].fully_nvlinked:
            return "needs NVLink between every two GPUs"
        return reason

    def refused(self, operation: Operation) -> str | None:
        """Refuse values whose type or reduction the variant cannot add up too."""
        if operation.reduces and (operation.reduce_op not in REDUCE_OPS or operation.dtype not in DTYPES):
            return f"adds up {' or '.join(DTYPES)} only, found {operation.reduce_op} of {operation.dtype}"
        return super().refused(operation)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `symmetric_us`. A reduce-scatter and an all-gather take about a half each."""
        ranks = topology.num_ranks
        latency, num_bytes = share_of_all_reduce(operation.kind, ranks)
        steps = latency * self.num_steps(ranks)
        return symmetric_us(operation.num_bytes * num_bytes, links.link("nvlink"), steps, self.share(ranks))

    def num_steps(self, num_ranks: int) -> int:
        """Return the steps of latency."""
        return self.steps

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives; here a slice of each other GPU, twice."""
        return ring_share(num_ranks)


class OneShot(SymmetricMemory):
    """All-reduce in which every GPU reads all others' values and adds them up itself."""

    name = "nvlink_one_shot"
    below_bytes = 256 << 10  # close to torch's own limit for its kernel
    steps = 3

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: all others' whole payloads."""
        return num_ranks - 1


class TwoShot(SymmetricMemory):
    """All-reduce in which every GPU adds up its slice, then collects the others' slices."""

    name = "nvlink_two_shot"
    below_bytes = 8 << 20  # torch's own limit for its kernel is 10 MB
    steps = 4  # a result has to be reduced before it is sent


class CopyEngines(SymmetricMemory):
    """All-reduce in which every GPU fetches the others' values of its slice and adds them up.

    Then every GPU fetches the others' sums.
    """

    name = "nvlink_copies"
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    from_bytes = 1 << 20  # below, starting a copy takes longer than the copy. Not measured.
    below_bytes = 1 << 30  # memory as large as the largest payload is kept
    steps = 5  # writing, adding up, three barriers

    def num_steps(self, num_ranks: int) -> int:
        """Return the steps of latency: each copy from a peer is one more."""
        return self.steps + 2 * (num_ranks - 1)


class Multimem(SymmetricMemory):
    """All-reduce in which the switch adds up each GPU's slice and spreads the result."""

    name = "nvlink_multimem"
    below_bytes = 64 << 20  # vLLM sees NCCL win from 64 MiB
    steps = 4

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse GPUs without an NVSwitch that reduces (Hopper's and later) too."""
        reason = super().unavailable(kind, device, topology)
        if reason is None and not topology.hosts[0].has_reducing_nvswitch:
            return "needs an NVSwitch that reduces"
        return reason

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: its reduced slice, then all of the result."""
        return (num_ranks + 1) / num_ranks


def symmetric_us(num_bytes: float, nvlink: Link, steps: float, share: float) -> float:
    """Return the time with `steps` of latency, in which each GPU receives `share` of the payload."""
    return steps * nvlink.latency_us + nvlink.us_per_byte * share * num_bytes
