"""Collectives among the CPU ranks of one host, through memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch.comm.algorithms.base import FLOATS, Choice, Collective, DeviceKind, Operation, OperationKind
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology

MOST_RANKS = 64
DTYPES = FLOATS | {"int8", "uint8", "int32", "int64", "bool"}
REDUCE_OPS = ("sum", "avg", "min", "max")


class SharedMemory(Collective):
    """Collectives in which every rank reads the others' values in place.

    One-shot or two-shot: the native code decides by size.
    """

    name = "shared_memory"
    in_memory = True

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse several hosts, a lone rank, more than 64 ranks, and CUDA tensors."""
        if topology.num_hosts > 1:
            return f"works on one host, found {topology.num_hosts}"
        return why_not_in_memory(device, topology)

    def refused(self, operation: Operation) -> str | None:
        """Refuse types and reductions without a kernel."""
        return without_kernel(operation)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: the measured all-reduce through memory; the other kinds move half as much."""
        time_us = links.link("memory").time_us(operation.num_bytes)
        return time_us if operation.kind == "all_reduce" else time_us / 2

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return one choice: the native code fits its chunks to the caches."""
        return (Choice(self.name),)


def why_not_in_memory(device: DeviceKind, topology: Topology) -> str | None:
    """Return why the ranks of one host cannot work through shared memory, or None if they can."""
    if device != "cpu":
        return f"works on CPU tensors, found {device}"
    if not 2 <= topology.ranks_per_host <= MOST_RANKS:
        return f"works among 2 to {MOST_RANKS} ranks of a host, found {topology.ranks_per_host}"
    return None


def without_kernel(operation: Operation) -> str | None:
    """Return why the kernels over shared memory do not take the operation, or None if they do."""
    if operation.dtype not in DTYPES:
        return f"has no kernel for {operation.dtype}"
    if not operation.reduces:
        return None
    if operation.reduce_op not in REDUCE_OPS:
        return f"has no kernel for the reduction {operation.reduce_op}"
    if operation.reduce_op == "avg" and operation.dtype not in FLOATS:
        return f"averages floating-point types only, found {operation.dtype}"
    if operation.dtype == "bool" and operation.reduce_op not in ("min", "max"):
        return f"reduces bool by min and max only, found {operation.reduce_op}"
    return None
