"""The inner backend (Gloo, NCCL) as it comes: always possible, and what everything else has to beat."""

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
        """Return None: what the engine refuses, it refuses with its own error."""
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Predicted time, from the measured all-reduce."""
        latency, rate = share_of_all_reduce(operation.kind, topology.num_ranks)
        return links.link("engine").scaled(latency=latency, rate=rate).time_us(operation.num_bytes)

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """One: there is nothing to set."""
        return (Choice(self.name),)
