"""All-reduce of GPUs without NVLink: copied into the host's memory, reduced by its processors, copied back.

In chunks of up to 4 MB, so that copies down, reduction, network and copies up overlap: a chunk comes by one copy and
goes by one, and three are on their way down while one is reduced. Each rank's part of the memory lies at its GPU's NUMA
node. Not yet run on several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepytorch.comm.algorithms.base import (
    FLOATS,
    Choice,
    Collective,
    DeviceKind,
    Operation,
    OperationKind,
    chunk_sizes,
    compressed_ratio,
)
from deepytorch.comm.algorithms.shared_memory import MOST_RANKS, REDUCE_OPS
from deepytorch.comm.topology.cost import Link, Links, all_reduce_link, cast_us_per_byte, pipeline_us
from deepytorch.comm.topology.topology import Topology

FROM_BYTES = 4 << 20  # DeepNCCL gains over NCCL above 4 MB; below, the copies' start-up costs more than they save
AREA_BYTES = 4 << 20  # of a chunk: at 24 GB/s a copy of 175 us, eight times its latency. Not measured.
TURN_US = 20.0  # assumed, of the thread that drives a chunk: two syncs of about 1 us, two copies and their events
MOST_STREAMS = 16


class CpuReduce(Collective):
    """GPU -> pinned shared memory -> reduced by the CPU (and between hosts) -> GPU."""

    name = "cpu_reduce"
    compresses = True
    in_memory = True

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Too few or unequal ranks on hosts, or another kind than all_reduce."""
        if kind != "all_reduce":
            return f"does all_reduce only, found {kind}"
        if not topology.is_regular:
            return "needs as many ranks on every host, found different numbers"
        if not 2 <= topology.ranks_per_host <= MOST_RANKS:
            return f"works among 2 to {MOST_RANKS} ranks of a host, found {topology.ranks_per_host}"
        return None

    def refused(self, operation: Operation) -> str | None:
        """CPU tensors, which it could copy to no avail; too few bytes; a type or reduction without a kernel."""
        if operation.device != "cuda":
            return f"works on CUDA tensors, found {operation.device}"
        if operation.dtype not in FLOATS or operation.reduce_op not in REDUCE_OPS:
            return f"has no kernel for {operation.reduce_op} of {operation.dtype}"
        if operation.num_bytes < FROM_BYTES:
            return f"starts at {FROM_BYTES} bytes, found {operation.num_bytes}"
        return None

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Predicted time: see `cpu_reduce_us`. As many chunks as there are streams travel at a time, as one wave."""
        num_chunks = max(choice.num_chunks(operation.num_bytes), math.ceil(operation.num_bytes / AREA_BYTES))
        num_streams = min(choice.num_streams, num_chunks)
        hosts, per_host = topology.num_hosts, topology.ranks_per_host
        ratio = compressed_ratio(operation.dtype, choice.compress)
        cast = 0.0 if choice.compress is None else cast_us_per_byte(links.copy_us_per_byte(), ratio)
        return cpu_reduce_us(
            operation.num_bytes,
            math.ceil(num_chunks / num_streams),
            links.link("pcie"),
            Link(TURN_US, reduce_us_per_byte(links.copy_us_per_byte(), per_host) + cast),
            all_reduce_link(links.network_link(per_host * num_streams), hosts) if hosts > 1 else Link(0.0, 0.0),
            ratio,
        )

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Chunks of each size that fits; over several hosts also each number of streams that the local ranks share."""
        per_host = topology.ranks_per_host
        shared = {streams // per_host for streams in links.network if streams % per_host == 0}
        counts = sorted({1} | {count for count in shared if 1 <= count <= MOST_STREAMS})
        return [
            Choice(self.name, chunk, streams)
            for streams in counts
            for chunk in [size for size in chunk_sizes(operation.num_bytes, streams) if size <= AREA_BYTES]
            or [AREA_BYTES]
            if chunk * max(2, streams) <= operation.num_bytes
        ]


def cpu_reduce_us(
    num_bytes: float, num_waves: float, pcie: Link, reduce: Link, between: Link, ratio: float = 1.0
) -> float:
    """Time of an all-reduce of `num_bytes` through the host's memory, cut into `num_waves` that overlap.

    `pcie` is one GPU's copy, either way (the two ways run at once); several are asked for ahead, so that their latency
    shows once each way. `reduce` is the reduction over payload bytes, and what each wave takes beside; `between` is the
    all-reduce among hosts over the payload, all 0 on one host; `ratio`: see compression.
    """
    wave_bytes = num_bytes / num_waves
    copy_us = pcie.us_per_byte * wave_bytes
    stages_us = (copy_us, reduce.time_us(wave_bytes), between.time_us(ratio * wave_bytes), copy_us)
    return 2 * pcie.latency_us + pipeline_us(stages_us, num_waves)


def reduce_us_per_byte(copy_us_per_byte: float, num_members: int) -> float:
    """Time to reduce a payload byte of each of `num_members`: all are read and one is written; a copy does one each."""
    return (num_members + 1) / 2 * copy_us_per_byte
