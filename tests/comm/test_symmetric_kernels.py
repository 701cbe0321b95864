"""All-reduce over symmetric memory: numbers in Triton's interpreter, machine code, and several ranks of one GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from deepytorch.comm.kernels import symmetric_triton
from deepytorch.comm.kernels.symmetric_triton import HEAD_BYTES, PROGRAMS, buffer_bytes, half_bytes
from tests.comm.ranks import run
from tests.comm.test_bucket_kernels import bits, compile_variants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rounds_to_nearest")]


class Node:
    """The buffers of all ranks in one process; a half that was read is the other one in the next call."""

    def __init__(self, world_size, half=1 << 16, calls=0):
        self.half = half
        self.memory = [torch.full((buffer_bytes(half),), 171, dtype=torch.uint8) for _ in range(world_size)]
        self.buffers = torch.tensor([each.data_ptr() for each in self.memory])
        self.calls = [torch.full((PROGRAMS,), calls, dtype=torch.int32) for _ in range(world_size)]

    def all_reduce(self, tensors, **kind):
        """Programs run in sequence and wait for nobody: what each rank writes is there for all in the next round.

        Three rounds: values, slices that are added up, all slices.
        """
        for _ in range(3):
            results = [tensor.clone() for tensor in tensors]
            for rank, result in enumerate(results):
                symmetric_triton.all_reduce(
                    result, self.buffers, self.calls[rank], self.half, rank, barrier=False, **kind
                )
        return results


def summed(tensors, average):
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return (total / len(tensors) if average else total).to(tensors[0].dtype)


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter runs each, also those that have no tile."""
    monkeypatch.setattr(symmetric_triton, "PROGRAMS", 4)


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="waits for nobody: interpreter only")


@needs_interpreter
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_rank_gets_the_bits_of_the_sum(few_programs, world_size, dtype, two_shot, average):
    node = Node(world_size)
    for vectors in (1, 5, 513) if world_size < 8 else (513,):
        size = vectors * 16 // dtype.itemsize
        tensors = [torch.randn(size).mul_(3).to(dtype) for _ in range(world_size)]
        expected = summed(tensors, average)
        for result in node.all_reduce(tensors, two_shot=two_shot, average=average):
            assert torch.equal(bits(result), bits(expected))


@needs_interpreter
@pytest.mark.parametrize("two_shot", [False, True])
def test_more_than_one_tile_a_program_and_memory_that_is_not_aligned(few_programs, two_shot):
    size = 4 * 2048 + 2048 + 4
    node = Node(2, half=half_bytes(4 * size))
    tensors = [torch.randn(size + 1)[1:] for _ in range(2)]
    expected = summed(tensors, False)
    for result in node.all_reduce(tensors, two_shot=two_shot, average=False):
        assert torch.equal(result, expected)


@needs_interpreter
@pytest.mark.parametrize("two_shot", [False, True])
def test_calls_take_the_halves_in_turn_and_leave_flags_alone(two_shot):
    for calls in (0, 1, 2):
        node = Node(2, calls=calls)
        node.all_reduce([torch.ones(8), torch.ones(8)], two_shot=two_shot, average=False)
        for memory in node.memory:
            head, *halves = memory.split([HEAD_BYTES, node.half, node.half])
            assert (head == 171).all()
            assert (halves[1 - calls % 2] == 171).all()
            assert not (halves[calls % 2][:32] == 171).all()
            assert (halves[calls % 2][32:] == 171).all()


@needs_interpreter
def test_infinities_and_zeros_keep_their_signs():
    tensors = [torch.tensor([-0.0, float("inf"), -float("inf"), 1.0]) for _ in range(2)]
    [result, _] = Node(2).all_reduce(tensors, two_shot=False, average=True)
    assert torch.equal(bits(result), bits(tensors[0]))


def test_a_buffer_holds_a_payload_twice():
    assert half_bytes(16) == 1 << 16
    assert half_bytes((1 << 20) + 16) == 1 << 21
    assert buffer_bytes(1 << 20) == HEAD_BYTES + (2 << 20)
    assert HEAD_BYTES % 16 == 0


def test_machine_code_for_every_gpu_is_sound(tmp_path):
    lines = compile_variants("deepytorch.comm.kernels.symmetric_triton", tmp_path)
    assert len(lines) == 3 * len(symmetric_triton.VARIANTS)


RANKS_OF_ONE_GPU = """
torch.cuda.set_device(0)
init("gloo", timeout=300.0)
from deepytorch.comm.group.devices.symmetric import SymmetricCollectives
collective = SymmetricCollectives(dist.group.WORLD.group_name)

def all_reduce(name, tensor, average):
    return collective(name, "all_reduce", tensor, tensor, average)
"""
OVERLAPPING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@pytest.mark.gpu
def test_ranks_of_one_gpu_get_the_bits_of_the_sum():
    script = (
        RANKS_OF_ONE_GPU
        + """
for name in ("nvlink_one_shot", "nvlink_two_shot", "nvlink_copies"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for average in (False, True):
            for size in (8, 40, 4096, 1 << 18, (1 << 20) + 8):
                given = []
                for each in range(size_of_group):
                    torch.manual_seed(100 * each + size % 97)
                    given.append(torch.randn(size).to(dtype))
                tensor = given[rank].cuda()
                torch.cuda.current_stream().wait_stream(all_reduce(name, tensor, average))
                total = given[0].float()
                for other in given[1:]:
                    total = total + other.float()
                expected = (total / size_of_group if average else total).to(dtype)
                assert torch.equal(tensor.cpu(), expected), (name, dtype, average, size)
dist.barrier()
dist.destroy_process_group()
"""
    ).replace("size_of_group", "dist.get_world_size()")
    run(script, 4, timeout=500, env=OVERLAPPING, warm=False)


@pytest.mark.gpu
def test_ten_thousand_calls_of_changing_sizes_do_not_hang():
    script = (
        RANKS_OF_ONE_GPU
        + """
import random
drawn = random.Random(0)
wrong = torch.zeros((), dtype=torch.int64, device="cuda")
for number in range(10_000):
    name = drawn.choice(("nvlink_one_shot", "nvlink_two_shot", "nvlink_copies"))
    tensor = torch.full((4 * drawn.choice((1, 7, 1000, 20_000)),), float(rank + number % 50), device="cuda")
    torch.cuda.current_stream().wait_stream(all_reduce(name, tensor, number % 2 == 0))
    total = 6.0 + 4 * (number % 50)
    wrong += (tensor != (total / 4 if number % 2 == 0 else total)).sum()
    if number % 1000 == 999:
        assert not wrong.item(), number
dist.barrier()
dist.destroy_process_group()
"""
    )
    run(script, 4, timeout=550, env=OVERLAPPING, warm=False)


@pytest.mark.gpu
def test_ranks_of_one_gpu_gather_and_scatter_by_copies():
    script = (
        RANKS_OF_ONE_GPU
        + """
world = dist.get_world_size()
for size in (1, 40, 4096, (1 << 18) + 3):
    parts = [torch.arange(size, device="cuda", dtype=torch.int64) + 1000 * each for each in range(world)]
    whole = torch.zeros(world * size, device="cuda", dtype=torch.int64)
    stream = collective("nvlink_copies", "all_gather", whole, parts[rank], False)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(whole, torch.cat(parts)), size
    for average in (False, True):
        given = torch.cat([part.float() for part in parts]) + rank
        output = torch.zeros(size, device="cuda")
        stream = collective("nvlink_copies", "reduce_scatter", output, given, average)
        torch.cuda.current_stream().wait_stream(stream)
        total = world * parts[rank].float() + sum(range(world))
        assert torch.equal(output, total / world if average else total), (size, average)
dist.barrier()
dist.destroy_process_group()
"""
    )
    run(script, 4, timeout=300, env=OVERLAPPING, warm=False)


@pytest.mark.gpu
def test_a_cuda_graph_replays_calls():
    script = (
        RANKS_OF_ONE_GPU
        + """
tensor = torch.full((4096,), 1.0, device="cuda")
torch.cuda.current_stream().wait_stream(all_reduce("nvlink_two_shot", tensor, False))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(3):
        torch.cuda.current_stream().wait_stream(all_reduce("nvlink_two_shot", tensor, False))
for _ in range(3):
    tensor.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (tensor == 64.0).all(), tensor
dist.barrier()
dist.destroy_process_group()
"""
    )
    run(script, 4, timeout=300, env=OVERLAPPING, warm=False)
