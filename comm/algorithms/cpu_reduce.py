"""All-reduce of GPUs without NVLink: copied into the host's memory, reduced by its processors, copied back.

The payload is cut into chunks of up to 4 MB, so that copies down, reduction, network and copies up overlap. Each chunk
takes one copy down and one copy up, and three chunks are being copied down while one is reduced. Each rank's part of
the memory is on its GPU's NUMA node. This algorithm has not yet run on several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepytorch.comm.algorithms.base import (
    FLOATS,
    Choice,
    Collective,
    Operation,
    chunk_sizes,
    compressed_cost,
    stream_counts,
)
from deepytorch.comm.algorithms.shared_memory import MOST_RANKS, REDUCE_OPS
from deepytorch.comm.topology.cost import Link, Links, all_reduce_link, pipeline_us
from deepytorch.comm.topology.topology import Topology

FROM_BYTES = 4 << 20  # DeepNCCL gains over NCCL above 4 MB; below, the start-up of copies costs more than is saved
AREA_BYTES = 4 << 20  # of a chunk: its copy takes 175 us at 24 GB/s, eight times the latency. Not measured.
TURN_US = 20.0  # assumed time of the thread that drives a chunk: two syncs of about 1 us, two copies and their events


class CpuReduce(Collective):
    """GPU -> pinned shared memory -> reduced by the CPU (and between hosts) -> GPU."""

    name = "cpu_reduce"
    compresses = True
    in_memory = True
    kinds = ("all_reduce",)
    equal_hosts = True
    ranks_of_a_host = (2, MOST_RANKS)
    from_bytes = FROM_BYTES

    def refused(self, operation: Operation) -> str | None:
        """Refuse CPU tensors (a copy would be useless), and types or reductions without a kernel too."""
        if operation.device != "cuda":
            return f"works on CUDA tensors, found {operation.device}"
        if operation.dtype not in FLOATS or operation.reduce_op not in REDUCE_OPS:
            return f"has no kernel for {operation.reduce_op} of {operation.dtype}"
        return super().refused(operation)

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time: see `cpu_reduce_us`.

        As many chunks as there are streams travel at once, as one wave.
        """
        num_chunks = max(choice.num_chunks(operation.num_bytes), math.ceil(operation.num_bytes / AREA_BYTES))
        num_streams = min(choice.num_streams, num_chunks)
        hosts, per_host = topology.num_hosts, topology.ranks_per_host
        ratio, cast_rate = compressed_cost(operation, links, choice)
        return cpu_reduce_us(
            operation.num_bytes,
            math.ceil(num_chunks / num_streams),
            links.link("pcie"),
            Link(TURN_US, reduce_us_per_byte(links.copy_us_per_byte(), per_host) + cast_rate),
            all_reduce_link(links.network_link(per_host * num_streams), hosts) if hosts > 1 else Link(0.0, 0.0),
            ratio,
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return chunks of each size that fits; on several hosts also each number of streams that local ranks share."""
        return [
            Choice(self.name, chunk, streams)
            for streams in stream_counts(links, topology.ranks_per_host)
            for chunk in [size for size in chunk_sizes(operation.num_bytes, streams) if size <= AREA_BYTES]
            or [AREA_BYTES]
            if chunk * max(2, streams) <= operation.num_bytes
        ]


def cpu_reduce_us(
    num_bytes: float, num_waves: float, pcie: Link, reduce: Link, between: Link, ratio: float = 1.0
) -> float:
    """Return the time of an all-reduce of `num_bytes` through the host's memory, cut into `num_waves` that overlap.

    Args:
        pcie: one GPU's copy, either way (the two ways run at once). Several copies are requested ahead, so that their
            latency appears once each way.
        reduce: the reduction over payload bytes, and the additional time of each wave.
        between: the all-reduce among hosts over the payload; all 0 on one host.
        ratio: bytes between hosts for each payload byte.
    """
    wave_bytes = num_bytes / num_waves
    copy_us = pcie.us_per_byte * wave_bytes
    stages_us = (copy_us, reduce.time_us(wave_bytes), between.time_us(ratio * wave_bytes), copy_us)
    return 2 * pcie.latency_us + pipeline_us(stages_us, num_waves)


def reduce_us_per_byte(copy_us_per_byte: float, num_members: int) -> float:
    """Return the time to reduce a payload byte of each of `num_members`.

    All bytes are read and one is written; a copy reads one and writes one.
    """
    return (num_members + 1) / 2 * copy_us_per_byte
