"""The inner backend's all-reduce over several connections at once, for networks where one does not fill the link."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepytorch.comm.algorithms.base import (
    Choice,
    Collective,
    DeviceKind,
    Operation,
    OperationKind,
    chunk_sizes,
    compressed_cost,
    stream_counts,
)
from deepytorch.comm.topology.cost import Link, Links, pipeline_us
from deepytorch.comm.topology.nominal import flat_ring
from deepytorch.comm.topology.topology import Topology


class Streams(Collective):
    """A flat all-reduce whose chunks take turns over several contexts, each with its own connections."""

    name = "streams"
    compresses = True
    kinds = ("all_reduce",)
    device = "cpu"  # NCCL's sockets are set before it starts
    several_hosts = True

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse several ranks on one host too."""
        if topology.num_hosts > 1 and topology.ranks_per_host > 1:
            return (
                f"works with one rank on each host, found {topology.ranks_per_host} (hierarchical does the same there)"
            )
        return super().unavailable(kind, device, topology)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: the engine's, with its rate scaled by the gain of more streams on this network."""
        num_chunks = choice.num_chunks(operation.num_bytes)
        num_streams = min(choice.num_streams, num_chunks)
        one, several = flat_ring(links, topology), flat_ring(links, topology, num_streams)
        gain = several.us_per_byte / one.us_per_byte if one.us_per_byte else 1.0
        ratio, cast_rate = compressed_cost(operation, links, choice)
        return streams_us(
            operation.num_bytes,
            math.ceil(num_chunks / num_streams),
            links.link("engine").scaled(rate=gain),
            ratio,
            cast_rate * topology.ranks_per_host,
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return each number of streams with a chunk or more for each; one stream is for compression only."""
        one, *counts = stream_counts(links, topology.ring_exits)
        return [Choice(self.name, num_streams=one)] + [
            Choice(self.name, chunk, streams)
            for streams in counts
            for chunk in chunk_sizes(operation.num_bytes, streams)
        ]


def streams_us(num_bytes: float, num_waves: float, engine: Link, ratio: float = 1.0, cast_rate: float = 0.0) -> float:
    """Return the time of a flat all-reduce of `num_bytes`, cut into `num_waves` of as many chunks as there are streams.

    Args:
        engine: the all-reduce of the whole group with these streams, us over payload bytes.
        cast_rate: the time of the casts, us per payload byte.
    """
    wave_bytes = num_bytes / num_waves
    return pipeline_us((cast_rate * wave_bytes, engine.time_us(ratio * wave_bytes)), num_waves)
