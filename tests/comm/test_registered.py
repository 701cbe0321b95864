"""Memory that NCCL is told of: what is asked of torch, and when there is none."""

from __future__ import annotations

import contextlib

import pytest
import torch

from deepytorch.comm.group.devices import registered
from deepytorch.comm.group.devices.registered import RegisteredMemory, registered_memory

MIB = 1 << 20


class Nccl:
    """What stands for torch's ProcessGroupNCCL."""

    mem_allocator = object()

    def __init__(self, offers=True):
        self.offers, self.pools = offers, []

    def supports_tensor_alloc(self, device):
        return self.offers

    def register_mem_pool(self, pool):
        assert pool.pieces, "what is in it is what NCCL is told of"
        self.pools.append(pool)


class Pool:
    """What stands for torch.cuda.MemPool."""

    def __init__(self, allocator):
        assert allocator is Nccl.mem_allocator
        self.pieces = []


@pytest.fixture
def pools(monkeypatch):
    zeros = torch.zeros
    current = []

    @contextlib.contextmanager
    def use(pool, device):
        current.append(pool)
        yield
        current.pop()

    def counted(*size, **options):
        made = zeros(*size, **options)
        if current:
            current[-1].pieces.append((made.data_ptr(), made.nbytes))
        return made

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", counted)


def test_a_piece_that_nobody_holds_is_given_again(pools):
    nccl = Nccl()
    memory = RegisteredMemory(nccl, torch.device("cpu"))
    held = memory.allocate(12 * MIB)[5:6]  # a part is enough
    memory.allocate(12 * MIB)  # dropped
    third = memory.allocate(12 * MIB)
    assert len(nccl.pools) == 2  # NCCL is told of a segment once
    del held
    for size, number in ((12 * MIB, 2), (13 * MIB, 3)):  # each of its size
        memory.allocate(size)
        assert len(nccl.pools) == number
    assert not third.any()


def test_each_piece_has_a_segment_of_its_own(pools):
    nccl = Nccl()
    memory = RegisteredMemory(nccl, torch.device("cpu"))
    for size in (5, 12 * MIB):
        made = memory.allocate(size)
        assert (made.shape, made.dtype) == ((size,), torch.uint8)
        assert not made.any()
        [piece] = nccl.pools[-1].pieces
        assert piece == (made.data_ptr(), max(size, 10 * MIB))  # of less several would share a segment
    assert nccl.pools[0] is not nccl.pools[1]


class Group:
    """A process group with this backend."""

    def __init__(self, backend):
        self.backend = backend

    def _get_backend(self, device):
        return self.backend


class Native:
    """Ours, around torch's."""

    def __init__(self, nccl):
        self.nccl = nccl

    def engine(self, on_cuda):
        assert on_cuda
        return self.nccl


def test_memory_is_offered_behind_a_switch_alone(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(registered, "native_backend", lambda group: None)
    assert registered_memory(Group(Nccl()), cuda)
    assert registered_memory(Group(Nccl(offers=False)), cuda) is None
    assert registered_memory(Group(Nccl()), torch.device("cpu")) is None
    for nccl, offered in ((Nccl(), True), (Nccl(offers=False), False), (None, False)):
        monkeypatch.setattr(registered, "native_backend", lambda group, nccl=nccl: Native(nccl))
        assert (registered_memory(Group(None), cuda) is not None) == offered
