"""Setup of the memory that the ranks of one host share, through the group's store; nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepytorch.comm.topology.topology import Topology, from_all
from deepytorch.log import once


def share_segment(
    native: Any,
    store: dist.Store,
    local_rank: int,
    num_ranks: int,
    areas: int,
    area_bytes: int,
    timeout: timedelta,
    room_bytes: int = 0,
    node: int = -1,
) -> Any | None:
    """Return the segment of the ranks that call this with one `store` (their own prefix); None if any rank fails.

    All ranks return a segment, or all return None. Local rank 0 makes the segment, the others open it by its process id
    and descriptor; each rank publishes its outcome, so that no rank goes on alone. room_bytes: the size that an area
    may grow to; 0: none. node: the NUMA node for the memory of this rank's areas; -1 leaves the choice to the kernel.
    """
    segment: Any | None = None
    trouble = ""
    try:
        if local_rank == 0:
            try:
                least_bytes = max(area_bytes, _least_area_bytes(num_ranks))
                segment = native.Segment.create(num_ranks, areas, least_bytes, room_bytes, node)
                offer = {"pid": os.getpid(), "descriptor": segment.descriptor, "token": segment.token}
            except native.CommError as error:
                offer = {"trouble": str(error)}
            store.set("offer", json.dumps(offer))
        else:
            offer = json.loads(_wait(store, "offer", timeout))
            if "trouble" in offer:
                raise native.CommError(offer["trouble"])
            segment = native.Segment.attach(offer["pid"], offer["descriptor"], offer["token"], local_rank, node)
        if segment is not None:
            segment.join()
        else:
            trouble = str(offer["trouble"])
    except native.CommError as error:
        segment, trouble = None, str(error)
    store.set(f"outcome/{local_rank}", trouble)
    outcomes = [_wait(store, f"outcome/{rank}", timeout).decode() for rank in range(num_ranks)]
    return segment if not _report(outcomes) else None


def _least_area_bytes(num_ranks: int) -> int:
    """Return the least bytes of an area: room for the sizes that ranks exchange, and a cache line for each rank."""
    return -(-128 * num_ranks // 4096) * 4096


def _wait(store: dist.Store, key: str, timeout: timedelta) -> bytes:
    store.wait([key], timeout)
    return store.get(key)


def _report(outcomes: Sequence[str]) -> bool:
    troubles = [f"local rank {rank}: {trouble}" for rank, trouble in enumerate(outcomes) if trouble]
    if troubles:
        once(logging.WARNING, "the ranks of this host go without shared memory (%s)", "; ".join(troubles[:3]))
    return bool(troubles)


def same_everywhere(store: dist.Store, topology: Topology, rank: int, mine: bool, timeout: timedelta) -> bool:
    """Return whether the ranks of every host share memory, which an algorithm over all hosts needs on each host."""
    return all(from_all(store, "shares", rank, topology.num_ranks, timeout, mine))
