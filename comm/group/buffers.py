"""Buffers in memory that the chosen algorithm reads directly, so that a caller who packs into one avoids copies."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.native import native
from deepytorch.comm.group.rendezvous import share_segment
from deepytorch.errors import ConfigError


def allocate(num_bytes: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return (num_bytes,) uint8 zeros on the CPU, in memory that the ranks of this host read from each other directly.

    Every rank of the group calls this function with the same size. If all ranks pass the same view of the same buffer,
    all_reduce runs in place without staging, and reduce_scatter_tensor and all_gather_into_tensor read their input
    without staging; otherwise the collectives work as on any tensor. The memory is freed with the last tensor that
    views it. If the ranks of the group share no memory, the tensor is in ordinary memory.

    Raises `ConfigError` for a size below 1, or a group of another backend.
    """
    if num_bytes < 1:
        raise ConfigError(f"allocate({num_bytes}); expected a number of bytes, 1 or more")
    found = group_of(group)
    number = next(found.allocations)
    host = found.topology.host_of[found.rank]
    local = found.topology.ranks_on(host)
    if found.backend.segment is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    store = dist.PrefixStore(f"allocation/{number}/{host}", found.store)
    local_rank = local.index(found.rank)
    module = native.load()
    assert module is not None
    region = share_segment(module, store, local_rank, len(local), 1, (num_bytes + 4095) // 4096 * 4096, found.timeout)
    if region is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    whole: torch.Tensor = found.backend.adopt(region)
    return whole[:num_bytes]
