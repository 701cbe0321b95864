"""Collectives by plain copies between GPUs that map each other's memory: their copy engines fetch what others have.

The processors are left to what is computed meanwhile, but for sums and barriers; what NCCL's kernels take of them slows
matrix multiplications down. Each rank puts its values where the others read them, and fetches theirs; sums are made in
float32 by the rank whose part they are, in the order of the ranks, and rounded once, so that every rank gets the same
bits. As torch's own low-contention collectives do it, but with a float32 sum, for all-reduce too, and without an output
of their own.

A call ends when all ranks have read what they need, so that the next one may write. A rank whose others do not come
waits without an end, as with the kernels and NCCL's. All of it is asynchronous, on the current stream. Not yet run on
several GPUs.

Bytes of each rank, of n with w ranks: an all-gather copies n / w, fetches n (w - 1) / w; a reduce-scatter copies n,
fetches n (w - 1) / w, and adds up n; an all-reduce does both, and copies its part once more.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_VECTOR_BYTES = 16


class Handle(Protocol):
    """What torch hands out for memory that all ranks of a group map: `_SymmetricMemory`."""

    rank: int
    world_size: int

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """A rank's memory, as a tensor. storage_offset: in elements."""
        ...

    def barrier(self, channel: int = 0) -> None:
        """What follows on this stream waits for what came before it on all ranks'."""
        ...


def all_gather(handle: Handle, output: Tensor, given: Tensor) -> None:
    """All ranks' `given`, in their order, into `output`: contiguous, of any one dtype, as many times as large."""
    parts, part = output.view(-1).view(torch.uint8).chunk(handle.world_size), given.view(-1).view(torch.uint8)
    _put(handle, part)
    handle.barrier()
    for peer in _others(handle):
        parts[peer].copy_(handle.get_buffer(peer, part.shape, torch.uint8))
    parts[handle.rank].copy_(part)
    handle.barrier()


def reduce_scatter(handle: Handle, output: Tensor, given: Tensor, average: bool) -> None:
    """The sum of all ranks' parts for this one, of `given`, into `output`; contiguous, of one floating-point dtype."""
    flat = given.view(-1)
    _put(handle, flat)
    handle.barrier()
    begin = handle.rank * output.numel()
    arrived = _fetched(handle, flat, begin, begin + output.numel())
    handle.barrier()
    output.view(-1).copy_(_sum(arrived, average))


def all_reduce(handle: Handle, tensor: Tensor, average: bool) -> None:
    """The sum of all ranks' values in place: contiguous, of a floating-point dtype."""
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
    """From the next rank on, so that not all read the same one at a time."""
    return [(handle.rank + step) % handle.world_size for step in range(1, handle.world_size)]


def _put(handle: Handle, values: Tensor) -> None:
    handle.get_buffer(handle.rank, values.shape, values.dtype).copy_(values)


def _fetched(handle: Handle, own: Tensor, begin: int, end: int) -> Tensor:
    """(ranks, end - begin): this part of all ranks' values, `own` this one's."""
    arrived = own.new_empty(handle.world_size, end - begin)
    for peer in _others(handle):
        arrived[peer].copy_(handle.get_buffer(peer, (end - begin,), own.dtype, begin))
    arrived[handle.rank].copy_(own[begin:end])
    return arrived


def _sum(arrived: Tensor, average: bool) -> Tensor:
    """Float32, one addition after the other: the order is the ranks'."""
    total = arrived[0].float()  # for float32 this is `arrived` itself, which nobody else reads
    for other in arrived[1:]:
        total.add_(other)
    return total.div_(len(arrived)) if average else total
