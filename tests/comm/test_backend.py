"""What the process group computes, against plain sums: every collective, dtype and reduction, however it is called."""

from __future__ import annotations

import textwrap

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(240, func_only=True)

CASES = """
def value(count, dtype, peer, spread=5):
    return ((torch.arange(count) * (2 * peer + 3) + peer) % spread + (peer + 1) % 3).to(dtype)

def reduced(values, op):
    stacked = torch.stack(values)
    if op == dist.ReduceOp.MIN:
        return stacked.min(0).values
    if op == dist.ReduceOp.MAX:
        return stacked.max(0).values
    wide = stacked.double() if stacked.is_floating_point() else stacked
    return (wide.sum(0) / (len(values) if op == dist.ReduceOp.AVG else 1)).to(stacked.dtype)

SUM, AVG, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WHOLE = [torch.int64, torch.int32, torch.int8, torch.uint8]
COUNTS = (1, 3, 1000, 8191, 70_001, 400_003)  # one-shot, its end, several chunks; with and without a rest

def check(found, wanted, *what):
    assert torch.equal(found, wanted), (*what, found.flatten()[:6], wanted.flatten()[:6])
"""

REDUCE = """
for dtype in FLOATS + WHOLE:
    for count in COUNTS:
        for op in (SUM, MIN, MAX) + ((AVG,) if dtype.is_floating_point else ()):
            values = [value(count, dtype, peer) for peer in range(size)]
            mine = values[rank].clone()
            work = dist.all_reduce(mine, op, async_op=count % 2 == 0)
            if work is not None:
                assert work.wait() and work.is_completed() and work.is_success()
            check(mine, reduced(values, op), "all_reduce", dtype, count, op)
"""

OTHERS = """
for dtype in FLOATS + WHOLE:
    for count in (1, 1000, 70_001):
        whole = [value(count * size, dtype, peer) for peer in range(size)]
        share = torch.empty(count, dtype=dtype)
        for op in (SUM, MAX) + ((AVG,) if dtype.is_floating_point else ()):
            dist.reduce_scatter_tensor(share, whole[rank].clone(), op)
            check(share, reduced(whole, op)[rank * count : (rank + 1) * count], "reduce_scatter", dtype, count, op)
        gathered = torch.empty(count * size, dtype=dtype)
        dist.all_gather_into_tensor(gathered, value(count, dtype, rank))
        check(gathered, torch.cat([value(count, dtype, peer) for peer in range(size)]), "all_gather", dtype, count)
        for root in range(size):
            mine = value(count, dtype, rank)
            dist.broadcast(mine, root)
            check(mine, value(count, dtype, root), "broadcast", dtype, count, root)
for dtype in (torch.bool, torch.complex64):  # no sums, but bytes are bytes
    mine = torch.full((777,), rank, dtype=torch.int64).to(dtype)
    gathered = torch.empty(777 * size, dtype=dtype)
    dist.all_gather_into_tensor(gathered, mine)
    check(gathered, torch.arange(size).repeat_interleave(777).to(dtype), dtype)
    dist.broadcast(mine, size - 1)
    check(mine, torch.full((777,), size - 1).to(dtype), dtype)
empty = torch.empty(0)
dist.all_reduce(empty)
"""

PLACES = """
for offset in (0, 1, 3):  # storage that starts anywhere
    base = torch.zeros(9_000)
    mine = base[offset : offset + 8_500]
    mine.copy_(value(8_500, torch.float32, rank))
    dist.all_reduce(mine)
    check(mine, sum(value(8_500, torch.float32, peer) for peer in range(size)), offset)
    assert not base[:offset].any() and not base[offset + 8_500 :].any()
for count in (90, 9_000):  # rows that do not follow each other
    columns = [value(count, torch.float32, peer).view(-1, 3) for peer in range(size)]
    for op in (SUM, AVG):
        base = torch.full((3, count // 3 + 5), -1.0)
        mine = base[:, : count // 3].t()
        mine.copy_(columns[rank])
        dist.all_reduce(mine, op)
        check(mine, reduced(columns, op), "strided all_reduce", count)
        assert (base[:, count // 3 :] == -1).all()
    mine = base[:, : count // 3].t()
    mine.copy_(columns[rank])
    work = dist.all_reduce(mine, async_op=True)
    [found] = work.get_future().wait()
    check(found, reduced(columns, SUM), "strided future")
    check(mine, reduced(columns, SUM), "strided async")
    mine.copy_(columns[rank])
    dist.broadcast(mine, 1)
    check(mine, columns[1], "strided broadcast")
    mine.copy_(columns[rank])
    dist.reduce(mine, 0)
    if rank == 0:
        check(mine, reduced(columns, SUM), "strided reduce")
    target = torch.empty(3, size * count // 3).t()
    dist.all_gather_into_tensor(target, columns[rank].t().contiguous().t())
    check(target, torch.cat(columns), "strided all_gather_into_tensor")
    parts = [torch.empty(3, count // 3).t() for _ in range(size)]
    dist.all_gather(parts, columns[rank].t().contiguous().t())
    check(torch.stack(parts), torch.stack(columns), "strided all_gather")
    share = torch.empty(3, count // 3).t()
    dist.reduce_scatter_tensor(share, torch.cat(columns).t().contiguous().t())
    check(share, columns[rank] * size, "strided reduce_scatter_tensor")
frozen = torch.nn.Parameter(value(2_000, torch.float32, rank))
with torch.no_grad():
    dist.all_reduce(frozen)
check(frozen.detach(), sum(value(2_000, torch.float32, peer) for peer in range(size)), "a parameter")
"""

ASYNC = """
tensors = [value(1 + 997 * (i % 40), torch.float32, rank) for i in range(120)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
for index in reversed(range(120)):  # waited for in any order
    works[index].wait()
    check(tensors[index], sum(value(1 + 997 * (index % 40), torch.float32, peer) for peer in range(size)), index)
tensor = value(50_000, torch.float32, rank)
tripled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 3)
check(tripled.wait(), 3 * sum(value(50_000, torch.float32, peer) for peer in range(size)), "then")

def broken(done):
    raise ValueError("of the callback")
error, _ = told(dist.all_reduce(torch.ones(2_000), async_op=True).get_future().then(broken).wait)
assert "of the callback" in error, error
coalesced = [value(count, torch.float32, rank) for count in (5, 40_000, 1)]
dist.all_reduce_coalesced(coalesced)
for found, count in zip(coalesced, (5, 40_000, 1)):
    check(found, sum(value(count, torch.float32, peer) for peer in range(size)), "coalesced", count)
"""

CHAIN = """
def chain(done, depth):  # a callback that waits for a later collective, and so on
    later = torch.ones(2_000)
    work = dist.all_reduce(later, async_op=True)
    future = work.get_future()
    if depth:
        future.then(lambda again: chain(again, depth - 1)).wait()
    else:
        work.wait()
    return later
first = dist.all_reduce(torch.ones(2_000), async_op=True).get_future()
check(first.then(lambda done: chain(done, 3)).wait(), torch.full((2_000,), float(size)), "chain")
"""

DELEGATED = """
parts = [value(10 + peer, torch.int64, peer) for peer in range(size)]
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "name": "x" * 1000 * rank})
assert [found["rank"] for found in objects] == list(range(size))
words = [f"from {rank}", rank]
dist.broadcast_object_list(words, 0)
assert words == ["from 0", 0]
scattered = [None]
dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0)
assert scattered == [rank]
mine = torch.empty(4)
dist.scatter(mine, [torch.full((4,), float(peer)) for peer in range(size)] if rank == 0 else None, 0)
check(mine, torch.full((4,), float(rank)), "scatter")
found = [torch.empty(4) for _ in range(size)] if rank == 0 else None
dist.gather(mine, found, 0)
if rank == 0:
    check(torch.stack(found)[:, 0], torch.arange(float(size)), "gather")
outputs = torch.empty(size)
dist.all_to_all_single(outputs, torch.arange(float(size)) + 10 * rank)
check(outputs, 10 * torch.arange(float(size)) + rank, "all_to_all")
if rank == 0:
    dist.send(torch.full((3,), 7.0), 1, tag=5)
elif rank == 1:
    mine = torch.empty(3)
    dist.recv(mine, 0, tag=5)
    check(mine, torch.full((3,), 7.0), "recv")
works = dist.batch_isend_irecv([
    dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
    dist.P2POp(dist.irecv, mine := torch.empty(2), (rank - 1) % size),
])
for work in works:
    work.wait()
check(mine, torch.full((2,), float((rank - 1) % size)), "batch_isend_irecv")
product = torch.full((5,), 2)
dist.all_reduce(product, dist.ReduceOp.PRODUCT)
check(product, torch.full((5,), 2**size), "product")
bits = torch.tensor([1 << rank])
dist.all_reduce(bits, dist.ReduceOp.BOR)
assert bits.item() == 2**size - 1
mean = torch.full((5,), float(rank), dtype=torch.complex64)
dist.all_reduce(mean)
check(mean.real, torch.full((5,), float(sum(range(size)))), "complex")
error, _ = told(lambda: dist.group.WORLD._get_backend(torch.device("cpu")).reduce([], dist.ReduceOptions()))
assert "expected one at least" in error, error
dist.barrier()
"""

GROUPS = """
from torch.distributed.device_mesh import init_device_mesh
assert dist.get_backend() == "deepytorch"
half = dist.new_group(list(range(size // 2)))
if rank < size // 2:
    mine = torch.full((3000,), float(rank))
    dist.all_reduce(mine, group=half)
    check(mine, torch.full((3000,), float(sum(range(size // 2)))), "sub-group")
gloo = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(3), group=gloo)
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
for name in ("outer", "inner"):
    mine = torch.full((5000,), float(rank))
    dist.all_reduce(mine, group=mesh[name].get_group())
    check(mine, torch.full((5000,), float(sum(dist.get_process_group_ranks(mesh[name].get_group())))), name)
dist.destroy_process_group()
for backend in ("deepytorch", "cpu:deepytorch", "gloo", "cpu:deepytorch,cuda:deepytorch"):  # and again
    init(backend, suffix=backend.replace(":", ""))
    mine = torch.full((4000,), float(rank))
    dist.all_reduce(mine)
    check(mine, torch.full((4000,), float(sum(range(size)))), backend)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("algorithm", [None, "engine"])
@pytest.mark.parametrize("part", [REDUCE, OTHERS], ids=["reduce", "others"])
def test_every_collective_dtype_and_reduction(part, algorithm):
    run(f"{CASES}\ninit(pg_options=Options(algorithm={algorithm!r}))\n{part}\ndist.destroy_process_group()", 2, 120)


def test_three_ranks_share_unevenly():
    """A third is not exact: gloo, which adds thirds, rounds more often than we do, so that it is left out here."""
    start = f"{CASES}\ninit(pg_options=Options(algorithm='shared_memory'))"
    run(f"{start}\n{REDUCE}\n{OTHERS}\ndist.destroy_process_group()", 3, 200)


def test_a_callback_may_wait_for_a_later_collective():
    run(f"{CASES}\ninit()\n{CHAIN}\ndist.destroy_process_group()", 2, 60)


@pytest.mark.parametrize("algorithm", [None, "engine"])
def test_tensors_anywhere_in_memory_asynchronous_calls_and_futures(algorithm):
    script = (
        f"{CASES}\ninit(pg_options=Options(algorithm={algorithm!r}))\n{PLACES}\n{ASYNC}\ndist.destroy_process_group()"
    )
    run(script, 2, 120)


def test_what_is_delegated_and_groups_of_all_kinds():
    run(f"{CASES}\ninit()\n{DELEGATED}\n{GROUPS}", 4, 120)


def test_a_single_rank():
    run(f"{CASES}\ninit()\n{REDUCE}\n{OTHERS}\ndist.destroy_process_group()", 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "True, 0, 1, 8192",
        "False, 4096, 2, 1 << 16",
        pytest.param("False, 256, 3, 4096", marks=pytest.mark.matrix),
    ],
)
def test_reduce_scatter_and_all_gather_over_hosts(setting):
    """In several chunks on their way at a time, over one connection and over two, ranks of a host not in a row."""
    script = """
    from dataclasses import replace
    from deepytorch.comm.group import backend
    found = backend.discover_host()
    backend.discover_host = lambda: replace(found, id=f"host {rank % 2 if interleaved else rank // 2}")
    init(pg_options=Options(algorithm="hierarchical", chunk_bytes=chunk, num_streams=streams, area_bytes=area))
    from deepytorch.comm import chosen
    assert chosen(kind="reduce_scatter").algorithm == chosen(kind="all_gather").algorithm == "hierarchical"
    assert chosen(kind="broadcast").algorithm == "engine"
    """
    start = f"interleaved, chunk, streams, area = {setting}\n{textwrap.dedent(script)}"
    run(f"{CASES}\n{start}\n{OTHERS}\ndist.destroy_process_group()", 4, 120)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["hierarchical", "cpu_reduce"])
@pytest.mark.parametrize("chunk_bytes", [64, 4096, 0])
def test_sums_over_hosts_in_chunks_of_any_size(algorithm, chunk_bytes):
    options = f"Options(algorithm={algorithm!r}, chunk_bytes={chunk_bytes}, num_streams=2)"
    start = f"{CASES}\npretend_hosts(2)\ninit(pg_options={options})\nCOUNTS = (0, 1, 63, 1000, 3001)"
    run(f"{start}\n{REDUCE}\ndist.destroy_process_group()", 4, 60)


@pytest.mark.slow
def test_hosts_of_one_and_of_two_ranks():
    for per_host in (1, 2):
        script = f"{CASES}\npretend_hosts({per_host})\ninit()\nCOUNTS = (1, 1000, 70_001)\n{REDUCE}\n{OTHERS}\n{PLACES}"
        run(f"{script}\ndist.destroy_process_group()", 2 * per_host, 200)
