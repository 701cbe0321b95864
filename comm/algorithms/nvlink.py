"""Collectives of GPUs that reach each other's memory through NVLink, over torch's symmetric memory.

Small all-reduces run as kernels, for low latency. Large ones run on copy engines, which leave the processors free for
computation. NCCL handles the sizes between. These algorithms have not yet run on several GPUs.
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

# Close to torch's own limits for its one-shot and two-shot kernels (256 KB, 10 MB); vLLM sees NCCL win from 64 MiB.
# The limits are exclusive powers of two, so that a range of a table never goes past them.
ONE_SHOT_BELOW_BYTES, TWO_SHOT_BELOW_BYTES, MULTIMEM_BELOW_BYTES = 256 << 10, 8 << 20, 64 << 20
MOST_RANKS = 8
DTYPES = ("fp32", "bf16", "fp16")
REDUCE_OPS = ("sum", "avg")
# Each counts as one step of latency: a kernel's launch, a barrier before it and one after it; one more for a result
# that has to be reduced before it is sent.
ONE_SHOT_STEPS, TWO_SHOT_STEPS = 3, 4
# Steps of copies, apart from one for each peer whose values are fetched: writing, adding up, three barriers.
COPY_STEPS = 5
COPIES_FROM_BYTES = 1 << 20  # below, starting a copy takes longer than the copy. Not measured.
COPIES_BELOW_BYTES = 1 << 30  # memory as large as the largest payload is kept


class SymmetricMemory(Collective):
    """The common part of the variants: where they can run, and which payloads they take."""

    kinds: tuple[OperationKind, ...] = ("all_reduce",)
    from_bytes = 0
    below_bytes: int | None = None
    steps: int

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse CPU tensors, several hosts, GPUs without NVLink between any two, and kinds that the variant lacks."""
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
        """Refuse too few or too many bytes, and values whose type or reduction the variant cannot add up."""
        if operation.reduces and (operation.reduce_op not in REDUCE_OPS or operation.dtype not in DTYPES):
            return f"adds up {' or '.join(DTYPES)} only, found {operation.reduce_op} of {operation.dtype}"
        if operation.num_bytes < self.from_bytes:
            return f"starts at {self.from_bytes} bytes, found {operation.num_bytes}"
        if self.below_bytes is not None and operation.num_bytes >= self.below_bytes:
            return f"works below {self.below_bytes} bytes, found {operation.num_bytes}"
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `symmetric_us`."""
        return symmetric_us(operation.num_bytes, links.link("nvlink"), self.steps, self.share(topology.num_ranks))

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return one choice: there is nothing to set."""
        return (Choice(self.name),)

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives."""
        raise NotImplementedError


class OneShot(SymmetricMemory):
    """All-reduce in which every GPU reads all others' values and adds them up itself."""

    name = "nvlink_one_shot"
    below_bytes = ONE_SHOT_BELOW_BYTES
    steps = ONE_SHOT_STEPS

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: all others' whole payloads."""
        return num_ranks - 1


class TwoShot(SymmetricMemory):
    """All-reduce in which every GPU adds up its slice, then collects the others' slices."""

    name = "nvlink_two_shot"
    below_bytes = TWO_SHOT_BELOW_BYTES
    steps = TWO_SHOT_STEPS

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: a slice of each other GPU, twice."""
        return 2 * (num_ranks - 1) / num_ranks


class CopyEngines(SymmetricMemory):
    """All-reduce in which every GPU fetches the others' values of its slice and adds them up.

    Then every GPU fetches the others' sums.
    """

    name = "nvlink_copies"
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    from_bytes, below_bytes = COPIES_FROM_BYTES, COPIES_BELOW_BYTES

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `symmetric_us`. A reduce-scatter and an all-gather take about a half each."""
        ranks = topology.num_ranks
        latency, num_bytes = share_of_all_reduce(operation.kind, ranks)
        whole = symmetric_us(operation.num_bytes * num_bytes, links.link("nvlink"), 0, self.share(ranks))
        return whole + latency * copy_steps(ranks) * links.link("nvlink").latency_us

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: a slice of each other GPU, twice."""
        return 2 * (num_ranks - 1) / num_ranks


class Multimem(SymmetricMemory):
    """All-reduce in which the switch adds up each GPU's slice and spreads the result."""

    name = "nvlink_multimem"
    below_bytes = MULTIMEM_BELOW_BYTES
    steps = TWO_SHOT_STEPS

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse what the other variants refuse, and GPUs without an NVSwitch that reduces (Hopper's and later)."""
        reason = super().unavailable(kind, device, topology)
        if reason is None and not topology.hosts[0].has_reducing_nvswitch:
            return "needs an NVSwitch that reduces"
        return reason

    def share(self, num_ranks: int) -> float:
        """Return the part of the payload that each GPU receives: its reduced slice, then all of the result."""
        return (num_ranks + 1) / num_ranks


def symmetric_us(num_bytes: float, nvlink: Link, steps: int, share: float) -> float:
    """Return the time of one kernel with `steps` of latency, in which each GPU receives `share` of the payload."""
    return steps * nvlink.latency_us + nvlink.us_per_byte * share * num_bytes


def copy_steps(num_ranks: int) -> int:
    """Return the steps of latency of an all-reduce by copies: each copy is one."""
    return COPY_STEPS + 2 * (num_ranks - 1)
