"""The groups of this process that run on deepytorch's backend, and what is known of each."""

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
    """What is known of one group of this process: its native backend, and what the choice was made by.

    `backend` is None in what is remembered: a group's memory goes with its `ProcessGroup`.
    """

    backend: Any
    topology: Topology
    links: Links
    options: Options
    store: dist.Store
    rank: int
    timeout: timedelta
    shares: bool = False  # whether the ranks of each host share memory
    gpus: tuple[str, ...] = ()  # their names, all ranks' where there are any
    registered_from: int | None = None  # bytes from which memory that NCCL was told of was measured to be faster
    allocations: Iterator[int] = field(default_factory=itertools.count)


_GROUPS: dict[str, Group] = {}  # by the name of the process group
_ON_STOCK: dict[str, str] = {}  # by name, why a group runs on stock gloo and nccl


def remember(name: str, group: Group) -> None:
    """What is known of the process group of this name; its memory is its own, so the backend is left out."""
    _GROUPS[name] = replace(group, backend=None)
    _ON_STOCK.pop(name, None)  # an earlier group of this name


def remember_stock(name: str, why: str) -> None:
    """Keep in mind why the process group of this name runs on stock gloo and nccl."""
    _ON_STOCK[name] = why


def on_stock() -> list[dict[str, str]]:
    """Return each group that was to be ours and runs on stock gloo and nccl, and why."""
    return [{"name": name, "why": why} for name, why in _ON_STOCK.items()]


def group_of(group: dist.ProcessGroup | None = None) -> Group:
    """What deepytorch knows of a process group (None: the default one). `ConfigError` where it is another backend's."""
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
    """What the process group of this name chooses by now, alike on all ranks."""
    if name in _GROUPS:
        _GROUPS[name] = replace(_GROUPS[name], links=links)


def set_registered_from(group: dist.ProcessGroup | None, num_bytes: int | None) -> None:
    """What was measured of a group of ours, alike on all ranks."""
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    name = process_group.group_name
    _GROUPS[name] = replace(_GROUPS[name], registered_from=num_bytes)


def registered_from(group: dist.ProcessGroup) -> int | None:
    """From how many bytes on buffers of this group are to be such that NCCL was told of; None: never."""
    try:
        return group_of(group).registered_from
    except ConfigError:  # of another backend
        return None


def native_backend(process_group: dist.ProcessGroup) -> Any | None:
    """The native backend of a process group, which may have another one for some device, and may be wrapped."""
    module = native.loaded() if Environment.read().enabled else None
    for device in process_group._device_types:
        found = process_group._get_backend(device)
        found = getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if module is not None and isinstance(found, module.Backend):
            return found
    return None


def averages(group: dist.ProcessGroup) -> bool:
    """Whether the group's all_reduce averages by itself, whatever name the group goes by: ours and nccl's do."""
    return native_backend(group) is not None or "nccl" in str(dist.get_backend(group))
