"""Memory registered with NCCL, which NCCL reads and writes in place, or lets the switch add up.

In each call NCCL requires that all ranks pass registered memory or none does, at the same offset from the start of the
registration. The ranks therefore allocate together, and agree that all succeeded. Each allocation has a segment of its
own and lies at its start on every rank, whenever it was made. A measurement (`comm.measure`) shows from which size on
registered memory is faster. This module has not yet run on several GPUs.

Source: "User Buffer Registration" in NCCL's user guide; `torch.cuda.MemPool` in torch's notes on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deepytorch.comm.group.groups import native_backend

_OWN_SEGMENT_BYTES = 10 << 20  # for fewer bytes, torch's allocator makes a segment of 20 MiB


class RegisteredMemory:
    """The registered memory of one group on one GPU."""

    def __init__(self, nccl: Any, device: torch.device) -> None:
        """Start without memory. nccl: the group's `ProcessGroupNCCL`."""
        self._nccl, self._device = nccl, device
        self._pools: list[tuple[int, Any, StorageWeakRef]] = []  # size, pool, and whether it is in use

    def connect(self) -> None:
        """Make NCCL create its communicator, which happens in NCCL's first call; all ranks call this."""
        self._nccl.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 zeros. Raises what torch or NCCL raise, a RuntimeError, if no memory is left."""
        size = max(num_bytes, _OWN_SEGMENT_BYTES)
        for place, (earlier, pool, piece) in enumerate(self._pools):
            if earlier == size and piece.expired():  # the pool keeps its segment registered
                del self._pools[place]
                return self._from(pool, size)[:num_bytes]
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._nccl.mem_allocator)
        whole = self._from(pool, size)
        self._nccl.register_mem_pool(pool)
        return whole[:num_bytes]

    def _from(self, pool: Any, size: int) -> Tensor:
        with torch.cuda.use_mem_pool(pool, self._device):
            whole = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._pools.append((size, pool, StorageWeakRef(whole.untyped_storage())))
        return whole


def registered_memory(group: dist.ProcessGroup, device: torch.device) -> RegisteredMemory | None:
    """Return a group's registered memory on this device; None if NCCL offers none (no NVSwitch) or does not run."""
    if device.type != "cuda":
        return None
    backend = native_backend(group)
    nccl = group._get_backend(device) if backend is None else backend.engine(True)
    offered = nccl is not None and nccl.supports_tensor_alloc(device)
    return RegisteredMemory(nccl, device) if offered else None


def allocate_together(
    memory: RegisteredMemory | None, sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[Tensor] | None:
    """Allocate memory of these sizes in bytes on all ranks together; return None on every rank if one rank fails.

    memory: None if NCCL offers this rank none. The function waits for the device twice, for the other ranks' answers.
    """
    if not _all_say(memory is not None, group, device):
        return None
    assert memory is not None
    made: list[Tensor] = []
    memory.connect()
    try:
        made += [memory.allocate(size) for size in sizes]
    except RuntimeError:
        made.clear()
    return made if _all_say(len(made) == len(sizes), group, device) else None


def _all_say(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    answers = torch.tensor(int(yes), device=device)
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=group)
    return bool(answers)
