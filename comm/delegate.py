"""The process group without any C++ of ours: stock gloo for CPU tensors, stock nccl for CUDA tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def stock_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of torch's own backends, which c10d takes as it is.

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
    return group


def inner_backends(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, Any | None]:
    """Stock gloo, and stock nccl where there is a GPU for it (else None)."""
    cpu = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    cpu._set_sequence_number_for_group()
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return cpu, None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    cuda = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    cuda._set_sequence_number_for_group()
    return cpu, cuda
