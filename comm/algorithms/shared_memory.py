"""Collectives among the CPU ranks of one host, through memory that they share."""

from __future__ import annotations

from deepytorch.comm.algorithms.base import FLOATS, Choice, Collective, Operation
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology

MOST_RANKS = 64
DTYPES = FLOATS | {"int8", "uint8", "int32", "int64", "bool"}
REDUCE_OPS = ("sum", "avg", "min", "max")


class InMemory(Collective):
    """The common part of algorithms in which kernels read the memory of all ranks of a host."""

    in_memory = True
    device = "cpu"
    ranks_of_a_host = (2, MOST_RANKS)

    def refused(self, operation: Operation) -> str | None:
        """Refuse types and reductions without a kernel."""
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


class SharedMemory(InMemory):
    """Collectives in which every rank reads the others' values in place.

    One-shot or two-shot, and chunks that fit the caches: the native code decides by size.
    """

    name = "shared_memory"
    several_hosts = False

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: the measured all-reduce through memory; the other kinds move half as much."""
        time_us = links.link("memory").time_us(operation.num_bytes)
        return time_us if operation.kind == "all_reduce" else time_us / 2
