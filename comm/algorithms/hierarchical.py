"""Collectives over several hosts in stages: inside a host, between hosts, inside a host.

Chunked, so that stages overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from deepytorch.comm.algorithms.base import Choice, Operation, chunk_sizes, compressed_cost, stream_counts
from deepytorch.comm.algorithms.shared_memory import InMemory
from deepytorch.comm.topology.cost import Link, Links, all_reduce_link, pipeline_us
from deepytorch.comm.topology.topology import Topology

_LEAST_OVERLAP = 0.25  # of stages where each core has a rank: ranks that wait leave theirs to others


class Hierarchical(InMemory):
    """Reduce-scatter through the host's memory, all-reduce of each local rank's slice between hosts, all-gather.

    reduce_scatter and all_gather are each a half of that: values are summed before they leave their host, and arrive at
    a host once for all of its ranks.
    """

    name = "hierarchical"
    compresses = True
    several_hosts = True
    equal_hosts = True
    kinds = ("all_reduce", "reduce_scatter", "all_gather")

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `hierarchical_us`.

        As many chunks as there are streams travel at once, as one wave.
        """
        num_chunks = choice.num_chunks(operation.num_bytes)
        num_streams = min(choice.num_streams, num_chunks)
        num_waves = math.ceil(num_chunks / num_streams)
        memory = links.link("memory")
        return hierarchical_us(
            operation.num_bytes,
            num_waves,
            topology.num_hosts,
            replace(memory, latency_us=memory.latency_us * num_chunks / num_waves),
            links.network_link(topology.ranks_per_host * num_streams),
            *compressed_cost(operation, links, choice),
            1 if operation.kind == "all_reduce" else 0.5,
            overlap_of_stages(operation, topology),
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return the whole payload or chunks, with each number of streams."""
        return [Choice(self.name)] + [
            Choice(self.name, chunk, streams)
            for streams in stream_counts(links, topology.ranks_per_host)
            for chunk in chunk_sizes(operation.num_bytes, streams)
        ]


def overlap_of_stages(operation: Operation, topology: Topology) -> float:
    """Return the part of the possible overlap of stages: as many as there are cores beside those that compute.

    On a CPU each rank computes on a core while its collectives run. A stage inside a host needs a core, too, as the
    connections of the stage between hosts do. On two cores, with two ranks on each of four hosts, both stages together
    took as long as one after the other; with two hosts a little less.
    """
    if operation.device != "cpu":
        return 1.0
    spare = min(host.cpus for host in topology.hosts) / topology.ranks_per_host - 1
    return min(1.0, max(_LEAST_OVERLAP, spare))


def hierarchical_us(
    num_bytes: float,
    num_waves: float,
    num_hosts: int,
    memory: Link,
    network: Link,
    ratio: float = 1.0,
    cast_rate: float = 0.0,
    share: float = 1,
    overlap: float = 1,
) -> float:
    """Return the time of a hierarchical all-reduce (or `share` of one) of `num_bytes`, cut into overlapping waves.

    There are `num_waves` waves. Both stages inside a host (half an all-reduce through `memory` each) and the casts
    (`cast_rate`, us per payload byte) keep the same cores busy, so they count as one stage. The rings between hosts,
    one per local rank, send `2 (H - 1) / H` of the payload out of each host, times `ratio` when compressed.
    """
    wave_bytes = num_bytes / num_waves
    inside_us = share * memory.time_us(wave_bytes) + cast_rate * wave_bytes
    between_us = share * all_reduce_link(network, num_hosts).time_us(ratio * wave_bytes)
    return pipeline_us((inside_us, between_us), num_waves, overlap)
