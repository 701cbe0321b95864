"""Collectives of GPUs that reach each other's memory through NVLink, over torch's symmetric memory.

All-reduces by kernels, for the latency of small messages; and large ones by copy engines, which leave the processors to
what is computed meanwhile. What lies between is NCCL's. Not yet run on several GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch.comm.algorithms.base import (
    Choice,
    Collective,
    DeviceKind,
    Operation,
    OperationKind,
    share_of_all_reduce,
)
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.comm.topology.topology import Topology

# About torch's own limits for its one-shot and two-shot kernels (256 KB, 10 MB); vLLM sees NCCL win from 64 MiB.
# Powers of two, not included, so that a range of a table never goes past them.
ONE_SHOT_BELOW_BYTES, TWO_SHOT_BELOW_BYTES, MULTIMEM_BELOW_BYTES = 256 << 10, 8 << 20, 64 << 20
MOST_RANKS = 8
DTYPES = ("fp32", "bf16", "fp16")
REDUCE_OPS = ("sum", "avg")
# Each about a step's latency: a kernel's launch, a barrier before it and one after it; one more for what has
# to be reduced before it is spread.
ONE_SHOT_STEPS, TWO_SHOT_STEPS = 3, 4
# Of copies, besides one for each peer whose values are fetched: values are put down, added up, and three barriers.
COPY_STEPS = 5
COPIES_FROM_BYTES = 1 << 20  # below, starting each copy takes longer than it takes. Not measured.
COPIES_BELOW_BYTES = 1 << 30  # which memory is kept for, as much as the largest payload


class SymmetricMemory(Collective):
    """What the variants share: where they can run, and what they take."""

    kinds: tuple[OperationKind, ...] = ("all_reduce",)
    from_bytes = 0
    below_bytes: int | None = None
    steps: int

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """CPU tensors, several hosts, GPUs without NVLink between any two, or a kind that it has not."""
        if device != "cuda":
            return f"works on CUDA tensors, found {device}"
        if topology.num_hosts > 1:
            return f"works on one host, found {topology.num_hosts}"
        if not 2 <= topology.num_ranks <= MOST_RANKS:
            return f"works among 2 to {MOST_RANKS} ranks, found {topology.num_ranks}"
        if not topology.hosts[0].fully_nvlinked:
            return "needs NVLink between every two GPUs"
        if kind not in self.kinds:
            return f"does {' and '.join(self.kinds)} only, found {kind}"
        return None

    def refused(self, operation: Operation) -> str | None:
        """Too few or too many bytes, or values to be added up of a type or by a reduction that it has not."""
        if operation.reduces and (operation.reduce_op not in REDUCE_OPS or operation.dtype not in DTYPES):
            return f"adds up {' or '.join(DTYPES)} only, found {operation.reduce_op} of {operation.dtype}"
        if operation.num_bytes < self.from_bytes:
            return f"starts at {self.from_bytes} bytes, found {operation.num_bytes}"
        if self.below_bytes is not None and operation.num_bytes >= self.below_bytes:
            return f"works below {self.below_bytes} bytes, found {operation.num_bytes}"
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Predicted time: see `symmetric_us`."""
        return symmetric_us(operation.num_bytes, links.link("nvlink"), self.steps, self.share(topology.num_ranks))

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """One: there is nothing to set."""
        return (Choice(self.name),)

    def share(self, num_ranks: int) -> float:
        """Part of the payload that each GPU receives."""
        raise NotImplementedError


class OneShot(SymmetricMemory):
    """Every GPU reads all others' values and adds them up itself."""

    name = "nvlink_one_shot"
    below_bytes = ONE_SHOT_BELOW_BYTES
    steps = ONE_SHOT_STEPS

    def share(self, num_ranks: int) -> float:
        """Part of the payload that each GPU receives: all others' whole."""
        return num_ranks - 1


class TwoShot(SymmetricMemory):
    """Every GPU adds up its slice, then collects the others'."""

    name = "nvlink_two_shot"
    below_bytes = TWO_SHOT_BELOW_BYTES
    steps = TWO_SHOT_STEPS

    def share(self, num_ranks: int) -> float:
        """Part of the payload that each GPU receives: a slice of each other one, twice."""
        return 2 * (num_ranks - 1) / num_ranks


class CopyEngines(SymmetricMemory):
    """Every GPU fetches the others' values of its slice, adds them up, and fetches the others' sums."""

    name = "nvlink_copies"
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    from_bytes, below_bytes = COPIES_FROM_BYTES, COPIES_BELOW_BYTES

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Predicted time: see `symmetric_us`; a reduce-scatter and an all-gather are about a half each."""
        ranks = topology.num_ranks
        latency, num_bytes = share_of_all_reduce(operation.kind, ranks)
        whole = symmetric_us(operation.num_bytes * num_bytes, links.link("nvlink"), 0, self.share(ranks))
        return whole + latency * copy_steps(ranks) * links.link("nvlink").latency_us

    def share(self, num_ranks: int) -> float:
        """Part of the payload that each GPU receives: a slice of each other one, twice."""
        return 2 * (num_ranks - 1) / num_ranks


class Multimem(SymmetricMemory):
    """The switch adds up each GPU's slice and spreads it."""

    name = "nvlink_multimem"
    below_bytes = MULTIMEM_BELOW_BYTES
    steps = TWO_SHOT_STEPS

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """As for the others, and GPUs without an NVSwitch that reduces (Hopper's and later)."""
        reason = super().unavailable(kind, device, topology)
        if reason is None and not topology.hosts[0].has_reducing_nvswitch:
            return "needs an NVSwitch that reduces"
        return reason

    def share(self, num_ranks: int) -> float:
        """Part of the payload that each GPU receives: its reduced slice, then all of the result."""
        return (num_ranks + 1) / num_ranks


def symmetric_us(num_bytes: float, nvlink: Link, steps: int, share: float) -> float:
    """Time of one kernel of so many `steps` of latency, in which each GPU receives `share` of the payload."""
    return steps * nvlink.latency_us + nvlink.us_per_byte * share * num_bytes


def copy_steps(num_ranks: int) -> int:
    """Steps of latency of an all-reduce by copies: each copy is one."""
    return COPY_STEPS + 2 * (num_ranks - 1)
