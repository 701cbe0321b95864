"""Collectives by plain copies between GPUs that map each other's memory: copy engines fetch the other ranks' values.

The GPU's multiprocessors stay free for concurrent computation, except for sums and barriers; NCCL's kernels occupy some
of them, which slows matrix multiplications down. Each rank copies its values into a staging buffer that the other ranks
map, and fetches theirs. The owner of a part sums it in float32, in rank order, and rounds the sum once, so that every
rank gets the same bits. torch's own low-contention collectives work alike, but without float32 sums, without an
all-reduce, and with an output that they allocate themselves.

A call ends when all ranks have read the values that they need, so that the next call may overwrite them. A rank whose
peers do not come waits forever, as with NCCL. All work is asynchronous, on the current stream. This module has not yet
run on several GPUs.

Bytes of each rank, of n with w ranks: an all-gather copies n / w and fetches n (w - 1) / w; a reduce-scatter copies n,
fetches n (w - 1) / w, and adds up n; an all-reduce does both, and copies its part once more.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_VECTOR_BYTES = 16


class Handle(Protocol):
    """The methods that are used of `_SymmetricMemory`, torch's handle of memory that all ranks of a group map."""

    rank: int
    world_size: int

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """Return a rank's memory as a tensor. storage_offset: in elements."""
        ...

    def barrier(self, channel: int = 0) -> None:
        """Make later work on this stream wait for the earlier work on the streams of all ranks."""
        ...


def all_gather(handle: Handle, output: Tensor, given: Tensor) -> None:
    """Write all ranks' `given`, in rank order, into `output`; both contiguous, of the same dtype, which may be any."""
    parts, part = output.view(-1).view(torch.uint8).chunk(handle.world_size), given.view(-1).view(torch.uint8)
    _put(handle, part)
    handle.barrier()
    for peer in _others(handle):
        parts[peer].copy_(handle.get_buffer(peer, part.shape, torch.uint8))
    parts[handle.rank].copy_(part)
    handle.barrier()


def reduce_scatter(handle: Handle, output: Tensor, given: Tensor, average: bool) -> None:
    """Write the sum of this rank's part of all ranks' `given` into `output`; both contiguous, of one float dtype."""
    flat = given.view(-1)
    _put(handle, flat)
    handle.barrier()
    begin = handle.rank * output.numel()
    arrived = _fetched(handle, flat, begin, begin + output.numel())
    handle.barrier()
    output.view(-1).copy_(_sum(arrived, average))


def all_reduce(handle: Handle, tensor: Tensor, average: bool) -> None:
    """Sum `tensor` over all ranks in place; contiguous, of a floating-point dtype."""
    flat = tensor.view(-1)
    step = _VECTOR_BYTES // flat.element_size()
    size = -(-flat.numel() // (handle.world_size * step)) * step
    bounds = [
        (min(rank * size, flat.numel()), min((rank + 1) * size, flat.numel())) for rank in range(handle.world_size)
    ]
    _put(handle, flat)
    handle.barrier()
    begin, end = bounds[handle.rank]
    if begin < end:
        flat[begin:end].copy_(_sum(_fetched(handle, flat, begin, end), average))
        handle.get_buffer(handle.rank, (end - begin,), flat.dtype, begin).copy_(flat[begin:end])
    handle.barrier()
    for peer in _others(handle):
        begin, end = bounds[peer]
        if begin < end:
            flat[begin:end].copy_(handle.get_buffer(peer, (end - begin,), flat.dtype, begin))
    handle.barrier()


def _others(handle: Handle) -> list[int]:
    """Return the other ranks, the next one first, so that not all ranks read from the same one at a time."""
    return [(handle.rank + step) % handle.world_size for step in range(1, handle.world_size)]


def _put(handle: Handle, values: Tensor) -> None:
    handle.get_buffer(handle.rank, values.shape, values.dtype).copy_(values)


def _fetched(handle: Handle, own: Tensor, begin: int, end: int) -> Tensor:
    """Return (ranks, end - begin): this part of all ranks' values. own: the values of this rank."""
    arrived = own.new_empty(handle.world_size, end - begin)
    for peer in _others(handle):
        arrived[peer].copy_(handle.get_buffer(peer, (end - begin,), own.dtype, begin))
    arrived[handle.rank].copy_(own[begin:end])
    return arrived


def _sum(arrived: Tensor, average: bool) -> Tensor:
    """Return the sum or average in float32, added in rank order."""
    total = arrived[0].float()  # for float32 a view of `arrived`, which no other code reads
    for other in arrived[1:]:
        total.add_(other)
    return total.div_(len(arrived)) if average else total
