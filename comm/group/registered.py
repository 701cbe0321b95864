"""Memory that NCCL was told of, so that it reads and writes it where it lies, or has the switch add it up.

NCCL asks that in each call all ranks give such memory or none does, at the same distance from where it was told that it
begins. So ranks make theirs together and agree that all could; and each piece has a segment of its own, at the head of
which it lies on every rank, whenever it was made. Whether it is faster is found by measuring (`comm.measure`). Not yet
run on several GPUs.

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

_OWN_SEGMENT_BYTES = 10 << 20  # of less, torch's allocator makes a segment of 20 MiB


class RegisteredMemory:
    """That of one group on one GPU."""

    def __init__(self, nccl: Any, device: torch.device) -> None:
        """`nccl`: the group's `ProcessGroupNCCL`."""
        self._nccl, self._device = nccl, device
        self._pools: list[tuple[int, Any, StorageWeakRef]] = []  # what each is of, and whether somebody holds it

    def connect(self) -> None:
        """Have NCCL make its communicator, which it does in its first call; on all ranks."""
        self._nccl.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()

    def allocate(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8 zeros. Raises what torch or NCCL raise, a RuntimeError, where there is none to be had."""
        size = max(num_bytes, _OWN_SEGMENT_BYTES)
        for place, (earlier, pool, piece) in enumerate(self._pools):
            if earlier == size and piece.expired():  # NCCL knows its segment, which stays the pool's
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
    """That of a group on this device; None where NCCL offers none, as without an NVSwitch, or does not run."""
    if device.type != "cuda":
        return None
    backend = native_backend(group)
    nccl = group._get_backend(device) if backend is None else backend.engine(True)
    offered = nccl is not None and nccl.supports_tensor_alloc(device)
    return RegisteredMemory(nccl, device) if offered else None


def allocate_together(
    memory: RegisteredMemory | None, sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[Tensor] | None:
    """Memory of these sizes in bytes, made by all ranks at this point; None on all of them where one of them cannot.

    memory: None where this rank is offered none. Waits for the device twice, for what the ranks say.
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
