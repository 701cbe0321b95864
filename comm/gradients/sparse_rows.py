"""Gradients of embeddings, sent as the rows that a batch has touched: traffic grows with the batch, not the table.

If a vocabulary is large relative to the tokens of a step, most of an embedding's gradient is zero, and it is the last
gradient of a backward: sent as a whole, it would be fully exposed. Each rank adds up its own rows, all ranks gather the
rows, and each adds everyone's in the order of the ranks, so that all get the same bits (Parallax sends rows of sparse
variables in this way: Kim et al. 2019).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepytorch.comm.gradients.bucket_sender import BucketSender
from deepytorch.comm.topology.cost import Link
from deepytorch.device_reads import read_would_sync

_RUN_AHEAD_US = 10_000.0  # how long a device may lack work after the host had to wait for it; not measured


@dataclass(frozen=True)
class Rows:
    """Rows of a gradient [num_rows, width]: `ids` [n] int64, each once, and `values` [n, width]."""

    ids: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Return the bytes of ids and values."""
        return self.ids.numel() * self.ids.element_size() + self.values.numel() * self.values.element_size()

    def add_to(self, table: Tensor, scale: float = 1.0) -> None:
        """Add the rows, `scale` times, to `table` [num_rows, width]."""
        table.index_put_((self.ids,), table[self.ids] + scale * self.values)


def summed_rows(ids: Tensor, values: Tensor, kept: Tensor | None) -> Rows:
    """Return the rows of ids [...] and values [..., width], with those of one id added up.

    kept: [...] or [..., 1], which rows count.
    """
    if kept is not None:
        kept = kept.expand(*ids.shape, 1) if kept.dim() > ids.dim() else kept.expand(ids.shape)
    values = values.reshape(-1, values.shape[-1])
    ids = ids.reshape(-1)
    if kept is not None:
        chosen = kept.reshape(-1)
        ids, values = ids[chosen], values[chosen]
    found, place = ids.long().unique(return_inverse=True)
    summed = torch.ops.aten.embedding_dense_backward(values.contiguous(), place, found.numel(), -1, False)
    return Rows(found, summed)


def add_rows(table: Tensor, ids: Tensor, values: Tensor, kept: Tensor | None) -> int:
    """Add rows, as `summed_rows` takes them, to `table` [num_rows, width]; return the bytes to send them as rows.

    The function does not wait for a device: there the result is an upper bound. No atomics, so that each run adds in
    the same order.
    """
    if not read_would_sync(ids):
        rows = summed_rows(ids, values, kept)
        rows.add_to(table)
        return rows.num_bytes
    if kept is not None:
        kept = kept.reshape(ids.shape) if kept.numel() == ids.numel() else kept.expand(ids.shape)
        ids, values = ids.where(kept, 0), values.where(kept.unsqueeze(-1), 0)
    ids, values = ids.reshape(-1).long(), values.reshape(-1, values.shape[-1])
    table.index_put_((ids,), values, accumulate=True)
    return ids.numel() * ids.element_size() + values.numel() * values.element_size()


def saves(rows_bytes: int, dense_bytes: int, link: Link, num_ranks: int, *, on_device: bool = False) -> bool:
    """Return whether gathering rows is predicted to be worth its two collectives and the host's wait for sizes.

    on_device: the host then waits for a device, which has no work until the next step has begun.
    """
    gathered = num_ranks * rows_bytes / 2  # an all-reduce sends nearly twice its payload, an all-gather once
    cost_us = 4 * link.latency_us + 500.0 + (_RUN_AHEAD_US if on_device else 0.0)
    return link.us_per_byte * (dense_bytes - gathered) > cost_us


def exchange_sizes(group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return, for each rank and table, the number of rows, or -1 if the rank has the whole gradient."""
    mine = torch.tensor(sizes, dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return [[int(number) for number in each.tolist()] for each in everyones]


def gather_rows(group: dist.ProcessGroup, mine: Rows | None, counts: Sequence[int], like: Tensor) -> list[Rows]:
    """Return the rows of every rank, which has `counts` of them. `like`: the table, for its width, dtype and device."""
    width, most = like.shape[1], max(counts)
    packed = torch.zeros(most, 8 + width * like.element_size(), dtype=torch.uint8, device=like.device)
    if mine is not None:
        own = mine.ids.numel()
        packed[:own, :8] = mine.ids.view(torch.uint8).view(own, 8)
        packed[:own, 8:] = mine.values.contiguous().view(torch.uint8).view(own, -1)
    everyones = [torch.empty_like(packed) for _ in counts]
    dist.all_gather(everyones, packed, group=group)
    return [
        Rows(
            each[:count, :8].contiguous().view(torch.int64).view(-1),
            each[:count, 8:].contiguous().view(like.dtype).view(count, width),
        )
        for each, count in zip(everyones, counts, strict=True)
    ]


def reduce_rows(group: dist.ProcessGroup, sender: BucketSender, rows_of: Mapping[int, Rows | None]) -> None:
    """Average the gradients that the sender's plan has as rows; a collective.

    rows_of: the rows of each member; None for a gradient that did not arrive. A missing member arrived as a whole, and
    then all ranks send that gradient as a whole.
    """
    began = time.perf_counter()
    plan, num_ranks = sender.plan, dist.get_world_size(group)
    alone = {bucket.members[0] for bucket in plan.buckets if bucket.as_rows}
    sizes = []
    for member in plan.tables:
        rows = rows_of.get(member)
        whole = member in alone and member not in rows_of
        sizes.append(-1 if whole else 0 if rows is None else rows.ids.numel())
    everyones = exchange_sizes(group, sizes, sender.device)
    for place, member in enumerate(plan.tables):
        mine, view = rows_of.get(member), sender.view(member)
        counts = [rank[place] for rank in everyones]
        if min(counts) < 0:
            if mine is not None:
                mine.add_to(view)  # the view is zero: see `GradientReducer.arrive_rows`
            sender.send_now(member)
            continue
        if max(counts) == 0:
            continue
        for rows in gather_rows(group, mine, counts, view):
            rows.add_to(view, 1.0 / num_ranks)
        began = sender.sent_rows(member, max(counts) * (8 + view.shape[1] * view.element_size()), began)
