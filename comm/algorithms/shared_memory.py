"""Collectives among the CPU ranks of one host, through memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch.comm.algorithms.base import FLOATS, Choice, Collective, Operation
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology

MOST_RANKS = 64
DTYPES = FLOATS | {"int8", "uint8", "int32", "int64", "bool"}
REDUCE_OPS = ("sum", "avg", "min", "max")


class SharedMemory(Collective):
    """Every rank reads the others' values where they lie. One-shot or two-shot: the native code decides by size."""

    name = "shared_memory"

    def unsupported(self, operation: Operation, topology: Topology) -> str | None:
        """Several hosts, a lone rank, more than 64, CUDA tensors, or a type or reduction without a kernel."""
        if topology.num_hosts > 1:
            return f"works on one host, found {topology.num_hosts}"
        return why_not_in_memory(operation, topology)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Predicted time: the measured all-reduce through memory; the other kinds move half as much."""
        time_us = links.link("memory").time_us(operation.num_bytes)
        return time_us if operation.kind == "all_reduce" else time_us / 2

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """One: the native code cuts its own chunks to the caches."""
        return (Choice(self.name),)


def why_not_in_memory(operation: Operation, topology: Topology) -> str | None:
    """Why the ranks of one host cannot do the operation through shared memory, or None where they can."""
    if operation.device != "cpu":
        return f"works on CPU tensors, found {operation.device}"
    if not 2 <= topology.ranks_per_host <= MOST_RANKS:
        return f"works among 2 to {MOST_RANKS} ranks of a host, found {topology.ranks_per_host}"
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
