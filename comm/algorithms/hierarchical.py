"""Collectives over several hosts in stages: inside a host, between hosts, inside a host.

Chunked, so that stages overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from deepytorch.comm.algorithms.base import (
    Choice,
    Collective,
    DeviceKind,
    Operation,
    OperationKind,
    chunk_sizes,
    compressed_ratio,
)
from deepytorch.comm.algorithms.shared_memory import why_not_in_memory, without_kernel
from deepytorch.comm.topology.cost import Link, Links, all_reduce_link, cast_us_per_byte, pipeline_us
from deepytorch.comm.topology.topology import Topology

MOST_STREAMS = 16
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class Hierarchical(Collective):
    """Reduce-scatter through the host's memory, all-reduce of each local rank's slice between hosts, all-gather.

    reduce_scatter and all_gather are each a half of that: values are summed before they leave their host, and arrive at
    a host once for all of its ranks.
    """

    name = "hierarchical"
    compresses = True
    in_memory = True

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Refuse a single host, one rank per host, hosts with unequal ranks, a broadcast, and CUDA tensors."""
        if topology.num_hosts == 1:
            return "needs several hosts, found 1"
        if not topology.is_regular:
            return "needs as many ranks on every host, found different numbers"
        if kind not in KINDS:
            return f"does {', '.join(KINDS)}, found {kind}"
        return why_not_in_memory(device, topology)

    def refused(self, operation: Operation) -> str | None:
        """Refuse types and reductions without a kernel."""
        return without_kernel(operation)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `hierarchical_us`.

        As many chunks as there are streams travel at once, as one wave.
        """
        num_chunks = choice.num_chunks(operation.num_bytes)
        num_streams = min(choice.num_streams, num_chunks)
        num_waves = math.ceil(num_chunks / num_streams)
        ratio = compressed_ratio(operation.dtype, choice.compress)
        memory = links.link("memory")
        return hierarchical_us(
            operation.num_bytes,
            num_waves,
            topology.num_hosts,
            replace(memory, latency_us=memory.latency_us * num_chunks / num_waves),
            links.network_link(topology.ranks_per_host * num_streams),
            ratio,
            0.0 if choice.compress is None else cast_us_per_byte(links.copy_us_per_byte(), ratio),
            1 if operation.kind == "all_reduce" else 0.5,
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return the whole payload or chunks, with each number of streams.

        The numbers are those that were measured and that the local ranks can share.
        """
        per_host = topology.ranks_per_host
        shared = {streams // per_host for streams in links.network if streams % per_host == 0}
        found = [Choice(self.name)]
        for streams in sorted({1} | {count for count in shared if 1 <= count <= MOST_STREAMS}):
            found += [Choice(self.name, chunk, streams) for chunk in chunk_sizes(operation.num_bytes, streams)]
        return found


def hierarchical_us(
    num_bytes: float,
    num_waves: float,
    num_hosts: int,
    memory: Link,
    network: Link,
    ratio: float = 1.0,
    cast_rate: float = 0.0,
    share: float = 1,
) -> float:
    """Return the time of a hierarchical all-reduce (or `share` of one) of `num_bytes`, cut into overlapping waves.

    There are `num_waves` waves. Both stages inside a host (half an all-reduce through `memory` each) and the casts
    (`cast_rate`, us per payload byte) keep the same cores busy, so they count as one stage. The rings between hosts,
    one per local rank, send `2 (H - 1) / H` of the payload out of each host, times `ratio` when compressed.
    """
    wave_bytes = num_bytes / num_waves
    inside_us = share * memory.time_us(wave_bytes) + cast_rate * wave_bytes
    between_us = share * all_reduce_link(network, num_hosts).time_us(ratio * wave_bytes)
    return pipeline_us((inside_us, between_us), num_waves)
