"""The process group without any C++ of ours: stock gloo for CPU tensors, stock nccl for CUDA tensors."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.config import process_environment


def stock_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[dist.ProcessGroup, Any, bool]:
    """A process group of torch's own backends, which c10d takes as it is; its gloo, and whether there is an nccl too.

    A Python subclass of `ProcessGroup` could delegate each method as well, but every method that it leaves to the base
    deadlocks sooner or later, because the base is called with the interpreter's lock held.
    """
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    cpu, cuda = inner_backends(store, rank, size, timeout)
    group._set_default_backend(kinds.NCCL if cuda is not None else kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, cpu)
    if cuda is not None:
        group._register_backend(torch.device("cuda"), kinds.NCCL, cuda)
    return group, cpu, cuda is not None


def inner_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta, single_host: bool = False
) -> tuple[Any, Any | None]:
    """Stock gloo, and stock nccl where there is a GPU for it (else None).

    single_host: gloo then takes one thread, and shares its listener with the other groups of this process.
    """
    prefix = dist.PrefixStore("gloo", store)
    gloo: Any = dist.ProcessGroupGloo
    if single_host:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = _listeners(os.getpid()), 1, timeout
        cpu = gloo(prefix, rank, size, options)
        options._threads = 2  # what is told of the group: gloo's one and ours
    else:
        cpu = gloo(prefix, rank, size, timeout)
    cpu._set_sequence_number_for_group()
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return cpu, None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    cuda = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    cuda._set_sequence_number_for_group()
    return cpu, cuda


@functools.cache
def _listeners(process: int) -> list[Any]:
    """Gloo's listeners of this process, for all groups of one host: as stock gloo chooses its network devices.

    process: its id, since a forked child has none of its parent's threads.
    """
    gloo, interfaces = dist.ProcessGroupGloo, process_environment().get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        return [gloo.create_device(interface=name) for name in interfaces.split(",")]
    return [gloo.create_default_device()]
