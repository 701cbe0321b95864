"""Communication hooks that a user gave to DistributedDataParallel, called with deepytorch's buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.gradients.bucket_memory import BucketMemory
from deepytorch.comm.group.bf16_wire import sends_bf16

Hook = Callable[[Any, Any], Any]


def only_averages(hook: Hook, state: Any, group: dist.ProcessGroup) -> bool:
    """Return whether a hook averages each bucket over the group's ranks and does nothing else, for any buckets.

    Other hooks keep a state by the index of a bucket, average over fewer ranks, or take optimizer steps.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as known

    if hook in (known.allreduce_hook, known.fp16_compress_hook, known.bf16_compress_hook):
        return (state or dist.group.WORLD) is group
    return sends_bf16(hook)


@dataclass(frozen=True)
class CommHook:
    """The arguments of `register_comm_hook(state, hook)`."""

    hook: Hook
    state: Any

    def start(self, memory: BucketMemory, index: int, is_last: bool) -> _Hooked:
        """Hand a full bucket over.

        The value of the hook's future is the bucket's result: deepytorch divides nothing.
        """
        return _Hooked(self.hook(self.state, _HookBucket(memory, index, is_last)), memory.buffer)


class _HookBucket:
    """The methods of `torch.distributed.GradBucket`, which cannot be constructed in Python."""

    def __init__(self, memory: BucketMemory, index: int, is_last: bool) -> None:
        self._memory, self._index, self._is_last = memory, index, is_last
        self._buffer = memory.buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer  # of another dtype, for hooks that compress before they call another hook

    def gradients(self) -> list[Tensor]:
        return list(self._memory.views)

    def parameters(self) -> list[nn.Parameter]:
        return list(self._memory.parameters)


class _Hooked:
    """A hook's future, with the interface of a bucket's work."""

    def __init__(self, future: torch.futures.Future[Any], buffer: Tensor) -> None:
        self._future, self._buffer = future, buffer

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def wait(self) -> None:
        result = self._future.wait()
        while isinstance(result, (list, tuple)):
            [result] = result
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view_as(self._buffer))
