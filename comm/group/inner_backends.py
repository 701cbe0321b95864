"""The stock backends, without deepytorch's C++: gloo for CPU tensors, nccl for CUDA tensors."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from deepytorch.comm.topology.topology import Topology
from deepytorch.config import process_environment


def stock_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a process group of torch's own backends, which c10d uses unchanged.

    A Python subclass of `ProcessGroup` could delegate each method as well, but every method that is left to the base
    class deadlocks sooner or later, because the base class is called with the GIL held.
    """
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    cpu: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    _count_from_one_number(cpu)
    cuda = _nccl(store, rank, size, timeout)
    group._set_default_backend(kinds.NCCL if cuda is not None else kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, cpu)
    if cuda is not None:
        group._register_backend(torch.device("cuda"), kinds.NCCL, cuda)
    return group


def inner_backends(
    store: dist.Store, rank: int, size: int, timeout: timedelta, single_host: bool = False
) -> tuple[Any, Any | None]:
    """Return gloo with one thread, and stock nccl, or None if there is no GPU for nccl.

    Stock gloo's two threads run two calls at a time, so that the second call may read what the first has yet to write.
    single_host: whether gloo shares its listener with the other groups of this process.
    Raises RuntimeError where a rank does not come.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _listeners(os.getpid()) if single_host else _listen()
    options._threads, options._timeout = 1, timeout
    try:
        cpu = gloo(dist.PrefixStore("gloo", store), rank, size, options)
    except RuntimeError:
        options._devices = []  # no peer may connect any more: the group that it would connect to is gone
        raise
    options._threads = 2  # the number that is reported for the group: gloo's thread and the group's
    _count_from_one_number(cpu)
    return cpu, _nccl(store, rank, size, timeout)


def _count_from_one_number(backend: Any) -> None:
    """Make all ranks count a backend's calls from the same number. torch 2.14 starts at 0, and warns of this call."""
    if TorchVersion(torch.__version__) < "2.14":
        backend._set_sequence_number_for_group()


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    cuda = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    _count_from_one_number(cuda)
    return cuda


class Streams:
    """The gloo groups over the same local rank of every host, each with its own connections, made on demand.

    Streams exist only if every host has the same number of ranks. All ranks must ask for the same number of them.
    """

    def __init__(
        self, store: dist.Store, topology: Topology, rank: int, timeout: timedelta, usable: bool = True
    ) -> None:
        self._store, self._timeout = store, timeout
        self._num_hosts, self._host = topology.num_hosts, topology.host_of[rank]
        self._place = topology.local_rank(rank)
        self._usable = usable and topology.num_hosts > 1 and topology.is_regular
        self._made: list[Any] = []

    def up_to(self, number: int) -> list[Any]:
        """Return this number of streams, or none if there is nothing to connect."""
        for stream in range(len(self._made), number if self._usable else 0):
            prefix = dist.PrefixStore(f"between/{self._place}/{stream}", self._store)
            self._made.append(dist.ProcessGroupGloo(prefix, self._host, self._num_hosts, self._timeout))
        return self._made[:number]


@functools.cache
def _listeners(process: int) -> list[Any]:
    """Return gloo's listeners of this process, for all groups of one host.

    process: the process id, since a forked child has none of its parent's threads.
    """
    return _listen()


def _listen() -> list[Any]:
    """Return new listeners, on the network devices that stock gloo chooses."""
    gloo, interfaces = dist.ProcessGroupGloo, process_environment().get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        return [gloo.create_device(interface=name) for name in interfaces.split(",")]
    return [gloo.create_default_device()]
