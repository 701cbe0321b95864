"""The memory of one bucket of gradients, and the bucket's state during a backward."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.gradients.buckets import Bucket
from deepytorch.comm.group.buffers import allocate
from deepytorch.comm.group.groups import registered_from
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import storage_use_count

if TYPE_CHECKING:
    from deepytorch.comm.group.devices.registered import RegisteredMemory


@dataclass
class Transfer:
    """The time span of one bucket's transfer, in seconds of `time.perf_counter`.

    waited: how long the backward stood still for the transfer. bucket: the bucket's place in the plan; for rows, the
    place of the bucket that their gradient lies in.
    """

    bucket: int
    num_bytes: int
    started: float
    ended: float = 0.0
    waited: float = 0.0
    wait_began: float = 0.0
    as_rows: bool = False


class BucketMemory:
    """A buffer, and views of it that have the layouts of the parameters."""

    def __init__(self, planned: Bucket, parameters: Sequence[nn.Parameter], buffer: Tensor) -> None:
        """Make the views. `parameters`: those of the bucket, in its order. `buffer`: `planned.num_bytes` of uint8."""
        self.parameters = list(parameters)
        self.buffer = buffer.view(parameters[0].dtype)
        self.views = [
            self.buffer.as_strided(each.shape, strides(each), self.buffer.storage_offset() + offset)
            for each, offset in zip(self.parameters, planned.offsets, strict=True)
        ]
        self.missing = 0
        self.launched = False
        self.work: Any = None
        self.transfer: Transfer | None = None
        self.rows: Transfer | None = None

    def begin(self) -> None:
        """Start a backward: all gradients are missing."""
        self.missing, self.launched = len(self.views), False
        self.work, self.transfer, self.rows = None, None, None

    def finish(self) -> float:
        """Wait for the bucket's transfer, if one is under way; return the seconds waited."""
        if self.work is None:
            return 0.0
        started = time.perf_counter()
        work, self.work = self.work, None
        work.wait()
        assert self.transfer is not None
        self.transfer.wait_began = started
        self.transfer.waited = time.perf_counter() - started
        return self.transfer.waited

    def is_held(self) -> bool:
        """Return whether anything other than `param.grad` and the reducer refers to the memory.

        The answer is True if this torch does not let it be known.
        """
        if not _owners_are_counted():
            return True
        own = 1 + len(self.views)
        storage = _storage(self.buffer)
        for parameter in self.parameters:
            own += parameter.grad is not None and _storage(parameter.grad) == storage
        return storage_use_count(self.buffer.untyped_storage()._cdata) > own + 1


class Buffers:
    """The allocator of one plan's buckets: zeros, of uint8.

    Memory is registered with NCCL by all ranks or by none. All ranks therefore allocate together, and a buffer that
    replaces one on a single rank is of the same kind.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._from_bytes = registered_from(group)
        self._registered: RegisteredMemory | None = None

    def for_all(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return buffers of these sizes.

        All ranks of the group allocate at this point, so that the memory may be shared.
        """
        large = [size for size in sizes if self._is_large(size)]
        if large:
            from deepytorch.comm.group.devices.registered import allocate_together, registered_memory

            memory = registered_memory(self._group, self._device)
            made = allocate_together(memory, large, self._group, self._device)
            if made is not None:
                self._registered = memory
                return [made.pop(0) if self._is_large(size) else self._shared(size) for size in sizes]
        return [self._shared(size) for size in sizes]

    def another(self, num_bytes: int) -> Tensor:
        """Return a buffer for this rank alone, in place of one of `for_all` of that size."""
        if self._registered is not None and self._is_large(num_bytes):
            return self._registered.allocate(num_bytes)
        return self._plain(num_bytes)

    def _is_large(self, num_bytes: int) -> bool:
        return self._from_bytes is not None and num_bytes >= self._from_bytes

    def _shared(self, num_bytes: int) -> Tensor:
        if self._device.type == "cpu":
            with contextlib.suppress(ConfigError):  # raised by other backends
                return allocate(num_bytes, self._group)
        return self._plain(num_bytes)

    def _plain(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


@functools.cache
def _owners_are_counted() -> bool:
    """Return whether this torch counts the owners of a storage as `is_held` assumes: tensors, views, and the caller."""
    whole = torch.zeros(2)
    views = [whole[:1], whole[1:]]
    counts = [storage_use_count(whole.untyped_storage()._cdata)]
    other = whole.detach()
    counts.append(storage_use_count(other.untyped_storage()._cdata))
    del other, views[1:]
    counts.append(storage_use_count(whole.untyped_storage()._cdata))
    return counts == [4, 5, 3]


def strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient, as autograd lays it out: like the parameter if that is dense."""
    return tuple(torch.empty_like(parameter, device="meta").stride())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
