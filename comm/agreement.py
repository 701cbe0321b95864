"""What the ranks of a group tell each other through its store, outside of any collective."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from deepytorch.errors import GradientError


def exchange(group: dist.ProcessGroup, key: str, mine: str, timeout: timedelta) -> list[str]:
    """What every rank says under `key`, in the order of the ranks; each says one thing under a key, once.

    Raises `GradientError`, which names the rank, where one does not speak within `timeout`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore(f"deepytorch/{key}", dist.distributed_c10d._get_process_group_store(group))
    store.set(str(rank), mine)
    deadline = time.monotonic() + timeout.total_seconds()
    for peer in range(size):
        try:
            store.wait([str(peer)], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError as error:  # of the store, each kind its own
            raise GradientError(
                f"rank {peer} did not come to reduce its gradients within {timeout.total_seconds():g} s; "
                "expected every rank to compile its DistributedDataParallel module with the deepytorch backend. Is "
                "it compiled otherwise, still compiling, or dead?"
            ) from error
    return [store.get(str(peer)).decode() for peer in range(size)]
