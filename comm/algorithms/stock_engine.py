"""The unmodified inner backend (Gloo, NCCL): always possible, and the baseline that every algorithm has to beat."""

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
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology


class Engine(Collective):
    """The inner backend's own collective over the whole group."""

    name = "engine"

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Return None: the engine itself raises an error for what it cannot do."""
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time, from the measured all-reduce."""
        latency, rate = share_of_all_reduce(operation.kind, topology.num_ranks)
        return links.link("engine").scaled(latency=latency, rate=rate).time_us(operation.num_bytes)

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return one choice: there is nothing to set."""
        return (Choice(self.name),)
