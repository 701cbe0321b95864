"""The groups of this process that run on deepytorch's backend, and a record of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepytorch.comm.group.native import native
from deepytorch.comm.group.options import Options
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import Environment
from deepytorch.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """The record of one group of this process: its native backend, and the facts that its choices depend on.

    `backend` is None in remembered records, so that a group's memory is freed with its `ProcessGroup`.
    """

    backend: Any
    topology: Topology
    links: Links
    options: Options
    store: dist.Store
    rank: int
    timeout: timedelta
    shares: bool = False  # whether the ranks of each host share memory
    gpus: tuple[str, ...] = ()  # the names of all ranks' GPUs
    registered_from: int | None = None  # bytes from which NCCL was measured to be faster in registered memory
    allocations: Iterator[int] = field(default_factory=itertools.count)


_GROUPS: dict[str, Group] = {}  # by the name of the process group
_ON_STOCK: dict[str, str] = {}  # by name, why a group runs on stock gloo and nccl


def remember(name: str, group: Group) -> None:
    """Remember the process group of this name, without its backend, whose memory must not outlive the group."""
    _GROUPS[name] = replace(group, backend=None)
    _ON_STOCK.pop(name, None)  # of an earlier group of this name


def remember_stock(name: str, why: str) -> None:
    """Remember why the process group of this name runs on stock gloo and nccl."""
    _ON_STOCK[name] = why


def on_stock() -> list[dict[str, str]]:
    """Return each deepytorch group that runs on stock gloo and nccl only, and why."""
    return [{"name": name, "why": why} for name, why in _ON_STOCK.items()]


def group_of(group: dist.ProcessGroup | None = None) -> Group:
    """Return the record of a process group (None: the default one). Raise `ConfigError` for another backend's group."""
    process_group = dist.group.WORLD if group is None else group
    name = None if process_group is None else process_group.group_name
    backend = None if process_group is None else native_backend(process_group)
    if name is None or name not in _GROUPS or backend is None:
        raise ConfigError(
            'this is not a process group of the "deepytorch" backend; expected one made by '
            'init_process_group("deepytorch") or new_group(backend="deepytorch"), with its C++ compiled: that is done '
            "beside a first run, and `deepytorch build` does it ahead"
        )
    return replace(_GROUPS[name], backend=backend)


def set_links(name: str, links: Links) -> None:
    """Set the links by which the process group of this name chooses, the same on all ranks."""
    if name in _GROUPS:
        _GROUPS[name] = replace(_GROUPS[name], links=links)


def set_registered_from(group: dist.ProcessGroup, num_bytes: int | None) -> None:
    """Set the bytes from which the group uses registered memory, as measured, the same on all ranks."""
    _GROUPS[group.group_name] = replace(_GROUPS[group.group_name], registered_from=num_bytes)


def registered_from(group: dist.ProcessGroup) -> int | None:
    """Return the bytes from which buffers of this group belong in memory that is registered with NCCL; None: never."""
    try:
        return group_of(group).registered_from
    except ConfigError:  # raised for another backend's group
        return None


def native_backend(process_group: dist.ProcessGroup) -> Any | None:
    """Return the native backend of a process group, also if it is wrapped or serves only one of the devices."""
    module = native.loaded() if Environment.read().enabled else None
    for device in process_group._device_types:
        found = process_group._get_backend(device)
        found = getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if module is not None and isinstance(found, module.Backend):
            return found
    return None


def averages(group: dist.ProcessGroup) -> bool:
    """Return whether the group's all_reduce can average: deepytorch's and nccl's can, whatever the group's name is."""
    return native_backend(group) is not None or "nccl" in str(dist.get_backend(group))
