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
    compressed_ratio,
)
from deepytorch.comm.topology.cost import Link, Links, cast_us_per_byte, pipeline_us
from deepytorch.comm.topology.nominal import flat_ring
from deepytorch.comm.topology.topology import Topology

MOST_STREAMS = 16


class Streams(Collective):
    """A flat all-reduce whose chunks take turns over several contexts, each with its own connections."""

    name = "streams"
    compresses = True

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse a single host, several ranks on one host, every kind except all_reduce, and CUDA tensors."""
        if topology.num_hosts == 1:
            return "needs several hosts, found 1"
        if topology.ranks_per_host > 1:
            return (
                f"works with one rank on each host, found {topology.ranks_per_host} (hierarchical does the same there)"
            )
        if kind != "all_reduce":
            return f"does all_reduce only, found {kind}"
        if device != "cpu":
            return f"works on CPU tensors, found {device} (NCCL's sockets are set before it starts)"
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: the engine's, with its rate scaled by the gain of more streams on this network."""
        num_chunks = choice.num_chunks(operation.num_bytes)
        num_streams = min(choice.num_streams, num_chunks)
        ratio = compressed_ratio(operation.dtype, choice.compress)
        one, several = flat_ring(links, topology), flat_ring(links, topology, num_streams)
        gain = several.us_per_byte / one.us_per_byte if one.us_per_byte else 1.0
        return streams_us(
            operation.num_bytes,
            math.ceil(num_chunks / num_streams),
            links.link("engine").scaled(rate=gain),
            ratio,
            0.0
            if choice.compress is None
            else cast_us_per_byte(links.copy_us_per_byte(), ratio) * topology.ranks_per_host,
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return each number of streams that was measured, with a chunk or more for each.

        One stream is for compression only.
        """
        exits = topology.ring_exits
        counts = sorted({streams // exits for streams in links.network if streams % exits == 0})
        several = [
            Choice(self.name, chunk, streams)
            for streams in counts
            if 2 <= streams <= MOST_STREAMS
            for chunk in chunk_sizes(operation.num_bytes, streams)
        ]
        return [Choice(self.name), *several]


def streams_us(num_bytes: float, num_waves: float, engine: Link, ratio: float = 1.0, cast_rate: float = 0.0) -> float:
    """Return the time of a flat all-reduce of `num_bytes`, cut into `num_waves` of as many chunks as there are streams.

    Args:
        engine: the all-reduce of the whole group with these streams, us over payload bytes.
        cast_rate: the time of the casts, us per payload byte.
    """
    wave_bytes = num_bytes / num_waves
    return pipeline_us((cast_rate * wave_bytes, engine.time_us(ratio * wave_bytes)), num_waves)
