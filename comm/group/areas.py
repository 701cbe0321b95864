"""Size and NUMA node of the areas: shared memory through which the ranks of a host exchange chunks."""

from __future__ import annotations

from collections.abc import Mapping

from deepytorch.comm.algorithms.cpu_reduce import AREA_BYTES
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology

PAGE_BYTES = 4096
_MOST_BYTES = 128 << 20  # for all ranks of a host together; reserved when the group is made
_MOST_ROOM_BYTES = 384 << 20  # likewise for copies from and to GPUs; reserved when the first CPU-Reduce runs


def num_areas(topology: Topology, through_host: bool) -> int:
    """Return the number of areas of a rank: one is filled, one reduced and one read; more between hosts or for GPUs.

    through_host: whether payloads may come from GPUs, or take the same way from the CPU.
    """
    return 3 if topology.num_hosts == 1 and not through_host else 6


def area_bytes(topology: Topology, areas: int, num_ranks: int, wanted: int = 0) -> int:
    """Return the bytes of an area: `wanted`, or fewer if many ranks share a host.

    If `wanted` is 0, an area has 512 KB on one host, so that chunks stay in the caches, and 2 MB on several hosts,
    where each chunk costs the network's latency.
    """
    return min(wanted or (1 << 21 if topology.num_hosts > 1 else 1 << 19), _share(_MOST_BYTES, areas, num_ranks))


def room_bytes(areas: int, num_ranks: int) -> int:
    """Return the bytes that an area may grow to for a GPU's chunks: 4 MB, or fewer if many ranks share a host."""
    return min(AREA_BYTES, _share(_MOST_ROOM_BYTES, areas, num_ranks))


def _share(most: int, areas: int, num_ranks: int) -> int:
    return max(PAGE_BYTES, most // (areas * num_ranks) // PAGE_BYTES * PAGE_BYTES)


def near_node(host: Host, device: int, environment: Mapping[str, str]) -> int:
    """Return the NUMA node that a GPU is attached to, or -1 if it is not known or the host has only one node.

    device: the GPU's index in this process, which CUDA_VISIBLE_DEVICES may make different from that on the host.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if device >= len(names) or not names[device].isdigit():  # fewer GPUs are visible, or the variable holds UUIDs
            return -1
        device = int(names[device])
    if len(host.numa_nodes) < 2:
        return -1
    return next((gpu.numa_node for gpu in host.gpus if gpu.index == device and gpu.numa_node is not None), -1)
