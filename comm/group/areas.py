"""How much shared memory each rank of a host gets for chunks on their way, and in which node's memory that lies."""

from __future__ import annotations

from collections.abc import Mapping

from deepytorch.comm.algorithms.cpu_reduce import AREA_BYTES
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology

PAGE_BYTES = 4096
_MOST_BYTES = 128 << 20  # of one host's ranks together; reserved when the group is made
_MOST_ROOM_BYTES = 384 << 20  # the same for copies of GPUs; taken when the first CPU-Reduce runs


def num_areas(topology: Topology, through_host: bool) -> int:
    """One that is brought, one that is reduced, one that is taken out; on the way to other hosts or from GPUs, more.

    through_host: whether payloads may come from GPUs, or as if they did.
    """
    return 3 if topology.num_hosts == 1 and not through_host else 6


def area_bytes(topology: Topology, areas: int, num_ranks: int, wanted: int = 0) -> int:
    """Bytes of an area: `wanted`, less where many ranks share a host.

    0: 512 KB on one host, whose chunks then stay in the caches; 2 MB between hosts, where a chunk costs the network's
    latency.
    """
    return min(wanted or (1 << 21 if topology.num_hosts > 1 else 1 << 19), _share(_MOST_BYTES, areas, num_ranks))


def room_bytes(areas: int, num_ranks: int) -> int:
    """What an area may grow to for a GPU's chunks: 4 MB, less where many ranks share a host."""
    return min(AREA_BYTES, _share(_MOST_ROOM_BYTES, areas, num_ranks))


def _share(most: int, areas: int, num_ranks: int) -> int:
    return max(PAGE_BYTES, most // (areas * num_ranks) // PAGE_BYTES * PAGE_BYTES)


def near_node(host: Host, device: int, environment: Mapping[str, str]) -> int:
    """The NUMA node that a GPU hangs on, -1 where that is not known or the host has one node.

    device: as this process counts them, which is not how the host does where CUDA_VISIBLE_DEVICES names some.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if device >= len(names) or not names[device].isdigit():  # fewer, or named by their UUIDs
            return -1
        device = int(names[device])
    if len(host.numa_nodes) < 2:
        return -1
    return next((gpu.numa_node for gpu in host.gpus if gpu.index == device and gpu.numa_node is not None), -1)
