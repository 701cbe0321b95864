"""Messages, other than tensors, that the ranks of a group exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist


def from_rank_0(group: dist.ProcessGroup, text: str, device: torch.device) -> str:
    """Return `text` of the group's rank 0 on every rank: a collective.

    The message does not go through the store, which ends with the process that holds it: rank 0 may have ended when a
    slow rank reads.
    """
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    count = torch.tensor([content.numel()], device=device)
    dist.broadcast(count, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        content = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return bytes(content.tolist()).decode()
