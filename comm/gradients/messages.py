"""What the ranks of a group tell each other beside their tensors."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from deepytorch.errors import GradientError
from deepytorch.torch_internals import get_process_group_store


def exchange(group: dist.ProcessGroup, key: str, mine: str, timeout: timedelta) -> list[str]:
    """What every rank says under `key`, in the order of the ranks; each says one thing under a key, once.

    Raises `GradientError`, which names the rank, where one does not speak within `timeout`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore(f"deepytorch/{key}", get_process_group_store(group))
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


def check_same(group: dist.ProcessGroup, key: str, mine: str, timeout: timedelta) -> None:
    """Every rank says what it is about to reduce, before the first of it: ranks that differ would wait in vain.

    Raises `GradientError` where a rank says something else, or nothing within `timeout`.
    """
    for peer, found in enumerate(exchange(group, key, mine, timeout)):
        if found != mine:
            raise GradientError(
                f"rank {peer} reduces other gradients than rank {dist.get_rank(group)}, or in other "
                "buckets; expected the same model, parameters that require grad, and settings on every rank"
            )


def from_rank_0(group: dist.ProcessGroup, text: str, device: torch.device) -> str:
    """`text` of the group's rank 0, on every rank: a collective.

    Not through the store, which goes with the process that holds it: rank 0 may have ended when a slow rank reads.
    """
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    count = torch.tensor([content.numel()], device=device)
    dist.broadcast(count, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        content = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return bytes(content.tolist()).decode()
