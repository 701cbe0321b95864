"""Recovery from lost ranks: the survivors form the default group anew."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepytorch.comm.group.groups import group_of
from deepytorch.errors import CommunicationError, ConfigError
from deepytorch.torch_internals import get_default_store

_LOOK_SECONDS = 0.05


def shrink(wait: timedelta = timedelta(seconds=10)) -> tuple[int, ...]:
    """Form the default process group anew among the ranks that are left, after one has died or hangs.

    Every survivor calls this function after a collective has raised an error. Ranks that call later than `wait` after
    the first one are left out; dead ranks of this host are not waited for. All groups are destroyed. The new default
    group has the old one's backend and timeout; its ranks are numbered in their old order. `RANK` and `WORLD_SIZE` of
    the environment do not change. Objects made on the old group (DDP, FSDP, samplers) have to be made again.

    Returns the old ranks of the new group's members, in the order of their new ranks. Raises `ConfigError` without a
    default group, `CommunicationError` where the group's store is gone (without torchrun it lives in rank 0), or where
    the others have gone on without this rank.
    """
    if not dist.is_initialized():
        raise ConfigError("shrink() found no default process group; expected init_process_group to have been called")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    backend, store = dist.get_backend(), get_default_store()
    timeout = _timeout_of(world)
    try:
        round_ = store.add(f"shrinks/{rank}", 1)
        keys = dist.PrefixStore(f"shrink/{round_}", store)
        keys.set(f"here/{rank}", "yes")
        members = _agree(keys, rank, size, wait)
    except (RuntimeError, dist.DistError) as error:
        raise CommunicationError(
            f"rank {rank} cannot reach the others through the group's store: {error}. Without torchrun the store lives "
            "in rank 0, and goes with it; torchrun keeps it in its own process"
        ) from error
    if rank not in members:
        raise CommunicationError(
            f"ranks {members} have gone on without rank {rank}, which did not come within {wait.total_seconds():g} s"
        )
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", keys),
        rank=members.index(rank),
        world_size=len(members),
        timeout=timeout,
    )
    return tuple(members)


def _agree(keys: dist.Store, rank: int, size: int, wait: timedelta) -> list[int]:
    """Return the ranks that are left: those that the first rank to stop waiting has seen."""
    dead, deadline = _dead(), time.monotonic() + wait.total_seconds()
    while True:
        here = [peer for peer in range(size) if peer == rank or keys.check([f"here/{peer}"])]
        late = time.monotonic() > deadline
        if late or set(here) | dead == set(range(size)) or keys.check(["members"]):
            break
        time.sleep(_LOOK_SECONDS)
        dead = _dead()
    members: list[int] = json.loads(keys.compare_set("members", "", json.dumps(here)))
    return members


def _dead() -> set[int]:
    """Return the ranks of this host that have died."""
    try:
        found = group_of()
    except ConfigError:
        return set()
    segment = found.backend.segment
    if segment is None:
        return set()
    ranks = found.topology.ranks_on(found.topology.host_of[found.rank])
    return {peer for local, peer in enumerate(ranks) if not segment.is_alive(local)}


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    try:
        return group_of(group).timeout
    except ConfigError:
        return distributed_c10d.default_pg_timeout
