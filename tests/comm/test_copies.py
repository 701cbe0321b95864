"""Collectives by copies between GPUs, on memory of the CPU that threads share: exact sums, and no rank too early."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepytorch.comm.group.devices import copies

DEADLINE_S = 20.0


class Handle:
    """One rank's handle of memory that all threads see. `slow`: this rank takes its time before it reads others."""

    def __init__(self, rank, memory, barrier, slow=False):
        self.rank, self.world_size = rank, len(memory)
        self._memory, self._barrier, self._slow = memory, barrier, slow

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        if self._slow and rank != self.rank:
            time.sleep(0.002)
        begin = storage_offset * dtype.itemsize
        count = torch.Size(sizes).numel() * dtype.itemsize
        assert begin + count <= self._memory[rank].numel(), "payloads fit"
        return self._memory[rank][begin : begin + count].view(dtype).view(sizes)

    def barrier(self, channel=0):
        self._barrier.wait(DEADLINE_S)


def on_ranks(ranks, call, num_bytes, slow=None):
    """What `call(handle)` gives on each of so many ranks."""
    memory = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(ranks)]
    barrier = threading.Barrier(ranks)

    def one(rank):
        try:
            return call(Handle(rank, memory, barrier, slow == rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def drawn(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(given, average):
    total = given[0].float()
    for other in given[1:]:
        total = total + other.float()
    return (total / len(given) if average else total).to(given[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 17, 1000, 1003])
def test_an_all_reduce_has_the_bits_of_the_sum_in_the_order_of_the_ranks(size, dtype, average, ranks):
    given = [drawn(rank, size, dtype) for rank in range(ranks)]

    def call(handle):
        tensor = given[handle.rank].clone()
        copies.all_reduce(handle, tensor, average)
        return tensor

    for found in on_ranks(ranks, call, size * dtype.itemsize):
        assert torch.equal(found, summed(given, average))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_reduce_scatter_adds_up_each_rank_s_part(in_place, dtype, average):
    ranks, part = 3, 11
    given = [drawn(rank, ranks * part, dtype).view(ranks, part) for rank in range(ranks)]

    def call(handle):
        own = given[handle.rank].clone()
        output = own[handle.rank] if in_place else torch.empty(part, dtype=dtype)
        copies.reduce_scatter(handle, output, own, average)
        return output

    for found, expected in zip(
        on_ranks(ranks, call, ranks * part * dtype.itemsize), summed(given, average), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_all_gather_moves_values_of_any_dtype(in_place, dtype):
    ranks, shape = 3, (2, 5)
    given = [(drawn(rank, 10, torch.float32) * 3).to(dtype).view(shape) for rank in range(ranks)]

    def call(handle):
        output = torch.zeros(ranks, *shape, dtype=dtype)
        own = given[handle.rank]
        if in_place:
            own = output[handle.rank].copy_(own)
        copies.all_gather(handle, output, own)
        return output

    for found in on_ranks(ranks, call, 10 * dtype.itemsize):
        assert torch.equal(found, torch.stack(given))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_rank_that_reads_late_meets_the_values_of_its_own_call(slow):
    ranks, size = 3, 12

    def call(handle):
        found = []
        for number in range(6):
            tensor = torch.full((size,), float(number + handle.rank))
            copies.all_reduce(handle, tensor, False)
            part, whole = torch.empty(size // ranks), torch.empty(size)
            copies.reduce_scatter(handle, part, torch.full((size,), float(number * handle.rank)), False)
            copies.all_gather(handle, whole, torch.full((size // ranks,), float(number * 10 + handle.rank)))
            found.append((tensor, part, whole))
        return found

    for found in on_ranks(ranks, call, 4 * size, slow):
        for number, (tensor, part, whole) in enumerate(found):
            assert tensor.tolist() == [3.0 * number + 3] * size
            assert part.tolist() == [3.0 * number] * (size // ranks)
            assert whole.view(ranks, -1)[:, 0].tolist() == [10.0 * number + rank for rank in range(ranks)]
