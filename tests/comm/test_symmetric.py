"""All-reduce through symmetric memory: what the group asks for, and what is asked of torch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from deepytorch.comm.group.devices import copies, symmetric
from deepytorch.comm.group.devices.symmetric import SymmetricCollectives
from deepytorch.errors import ConfigError
from tests.comm.ranks import run


class Handle:
    """torch's handle of symmetric memory, without any other rank's."""

    rank, world_size = 1, 2

    def __init__(self, memory):
        self.memory = memory

    def get_buffer(self, rank, shape, dtype):
        whole = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[:whole].view(dtype).view(shape)


class Memory:
    """What stands for torch's class; counts what is allocated."""

    def __init__(self):
        self.sizes = []

    def empty_strided_p2p(self, size, stride, dtype, device, group_name):
        assert (stride, dtype, group_name) == ([1], torch.uint8, "0")
        self.sizes.append(size[0])
        return torch.empty(size, dtype=dtype)

    def rendezvous(self, memory):
        assert not memory.any()
        return Handle(memory)


class Stream:
    """A stream of a machine without any."""

    def __init__(self, priority=0):
        self.waited = 0

    def wait_stream(self, other):
        self.waited += 1


@pytest.fixture
def memory(monkeypatch):
    """A torch that has symmetric memory, and streams, on the CPU."""
    made = Memory()
    monkeypatch.setattr(symmetric, "SymmetricMemory", made)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return made


def in_place(run):
    """The all-reduce of these collectives."""
    return lambda name, tensor, average: run(name, "all_reduce", tensor, tensor, average)


OPERATORS = {
    "nvlink_one_shot": "one_shot_all_reduce",
    "nvlink_two_shot": "two_shot_all_reduce_",
    "nvlink_multimem": "multimem_all_reduce_",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_torchs_operators_where_there_is_no_kernel(monkeypatch, memory, name, average, dtype):
    asked = []

    def operator(buffer, op, group):
        asked.append((op, group, buffer.dtype))
        return buffer * 2 if name == "nvlink_one_shot" else buffer.mul_(2)

    monkeypatch.setattr(torch.ops.symm_mem, OPERATORS[name], operator, raising=False)
    monkeypatch.setattr(symmetric, "has_triton_package", lambda: False)
    all_reduce = in_place(SymmetricCollectives("0"))
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype)
    stream = all_reduce(name, tensor, average)
    assert torch.equal(tensor, torch.arange(12.0).reshape(3, 4).to(dtype) * (1 if average else 2))
    assert asked == [("sum", "0", torch.float32)]  # torch has no kernels for float16
    assert stream.waited == 1
    all_reduce(name, tensor, average)
    assert memory.sizes == [64]
    all_reduce(name, torch.ones(64, dtype=dtype), average)
    assert memory.sizes == [64, 256]


@pytest.mark.parametrize("name", ["nvlink_one_shot", "nvlink_two_shot"])
def test_kernels_where_triton_is(monkeypatch, memory, name):
    kernels = pytest.importorskip("deepytorch.comm.kernels.symmetric_triton")
    calls = []
    monkeypatch.setattr(symmetric, "has_triton_package", lambda: True)
    monkeypatch.setattr(kernels, "all_reduce", lambda *given, **named: calls.append((given, named)))
    all_reduce = in_place(SymmetricCollectives("0"))
    tensor = torch.ones(8)
    all_reduce(name, tensor, True)
    all_reduce(name, tensor, False)
    [first, second] = calls
    assert first[0][0] is tensor
    assert first[0][1].tolist() == second[0][1].tolist()
    assert first[0][4] == 1  # this rank
    assert first[1] == {"two_shot": name == "nvlink_two_shot", "average": True}
    assert not second[1]["average"]
    assert memory.sizes == [kernels.buffer_bytes(1 << 16)]
    all_reduce(name, torch.ones(1 << 15), True)
    assert memory.sizes[1:] == [kernels.buffer_bytes(1 << 17)]


def test_memory_is_not_set_up_inside_of_a_recording(monkeypatch, memory):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="expected one as large to have run before"):
        in_place(SymmetricCollectives("0"))("nvlink_multimem", torch.ones(4), False)


def test_the_group_asks_for_sums_and_averages_of_floats():
    script = """
    init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    asked = []
    def run(name, kind, output, given, average):
        assert kind == "all_reduce" and output.data_ptr() == given.data_ptr()
        asked.append((name, output.dtype, average))

    backend.set_symmetric(run)
    for fixed in (False, True):
        backend.set_table("all_reduce", False, [(1 << 40, "nvlink_two_shot", 0, 1, "exact")], fixed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.all_reduce(torch.ones(8, dtype=dtype), op)
            assert asked.pop() == ("nvlink_two_shot", dtype, op == dist.ReduceOp.AVG), op
    work = dist.all_reduce(torch.ones(8), async_op=True)
    assert work.get_future().wait()[0].tolist() == [1.0] * 8
    work.wait()
    assert asked.pop()
    for tensor, op in (
        (torch.ones(8), dist.ReduceOp.MAX), (torch.ones(7), dist.ReduceOp.SUM),
        (torch.ones(8).int(), dist.ReduceOp.SUM),
        (torch.ones(8, 8)[:, ::2], dist.ReduceOp.SUM), (torch.ones(0), dist.ReduceOp.SUM),
    ):
        dist.all_reduce(tensor, op)
        assert asked == [], (tensor.shape, op)
    dist.destroy_process_group()
    """
    run(script, 2, timeout=60)


def test_copies_take_memory_as_large_as_what_a_rank_gives(monkeypatch, memory):
    calls = []
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        monkeypatch.setattr(copies, kind, lambda *given, kind=kind: calls.append((kind, given)))
    run = SymmetricCollectives("0")
    given, output = torch.ones(12), torch.ones(24)
    stream = run("nvlink_copies", "all_gather", output, given, False)
    run("nvlink_copies", "reduce_scatter", given, output, True)
    run("nvlink_copies", "all_reduce", given, given, True)
    assert [kind for kind, _ in calls] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert calls[0][1][1:] == (output, given)
    assert calls[1][1][1:] == (given, output, True)
    assert calls[2][1][1:] == (given, True)
    assert memory.sizes == [64, 128]
    assert stream.waited == 3


def test_the_group_asks_copies_for_gathers_and_scatters_too():
    script = """
    init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    asked = []
    backend.set_symmetric(lambda name, kind, output, given, average: asked.append((name, kind, output, given, average)))
    for fixed in (False, True):
        for kind in ("all_gather", "reduce_scatter"):
            backend.set_table(kind, False, [(1 << 40, "nvlink_copies", 0, 1, "exact")], fixed)
    whole, part = torch.zeros(10), torch.ones(5)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    work.wait()
    [(name, kind, output, given, average)] = asked
    assert (name, kind, average) == ("nvlink_copies", "all_gather", False)
    assert (output.data_ptr(), given.data_ptr()) == (whole.data_ptr(), part.data_ptr())
    assert work.get_future().wait()[0].data_ptr() == whole.data_ptr()
    asked.clear()
    dist.all_gather_into_tensor(torch.zeros(10, dtype=torch.bool), torch.ones(5, dtype=torch.bool))
    assert asked.pop()[1] == "all_gather"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.reduce_scatter_tensor(part.to(dtype), whole.to(dtype), op)
            name, kind, output, given, average = asked.pop()
            assert (name, kind, average) == ("nvlink_copies", "reduce_scatter", op == dist.ReduceOp.AVG)
            assert (output.numel(), given.numel()) == (5, 10)
    dist.reduce_scatter_tensor(part, torch.ones(10), dist.ReduceOp.MAX)
    dist.reduce_scatter_tensor(part.int(), torch.ones(10).int())
    dist.reduce_scatter_tensor(part[:0], whole[:0])
    dist.all_gather_into_tensor(whole[:0], part[:0])
    for kind in ("all_gather", "reduce_scatter"):  # kernels only all-reduce
        backend.set_table(kind, False, [(1 << 40, "nvlink_two_shot", 0, 1, "exact")], False)
    dist.all_gather_into_tensor(whole, part)
    dist.reduce_scatter_tensor(part, torch.ones(10))
    assert asked == []
    assert part.tolist() == [2.0] * 5
    dist.destroy_process_group()
    """
    run(script, 2, timeout=60)
