"""Collectives that only move data: gathers, scatters, exchanges, broadcasts."""

from __future__ import annotations

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(240, func_only=True)


MOVES = """
def value(count, peer, dtype=torch.float32):
    return ((torch.arange(count) * 3 + 5 * peer) % 120).to(dtype)

for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
    for count in (1, 1000, 300_001):
        if dtype == torch.complex64 and count > 1000:
            continue
        mine = value(count, rank, dtype)
        for root in range(size):
            parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, parts, root)
            if rank == root:
                for peer, part in enumerate(parts):
                    assert torch.equal(part.view(torch.uint8), value(count, peer, dtype).view(torch.uint8))
            given = [value(count, 7 * peer + root, dtype) for peer in range(size)] if rank == root else None
            got = torch.empty_like(mine)
            dist.scatter(got, given, root)
            assert torch.equal(got.view(torch.uint8), value(count, 7 * rank + root, dtype).view(torch.uint8))
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        for peer, part in enumerate(parts):
            assert torch.equal(part.view(torch.uint8), value(count, peer, dtype).view(torch.uint8))
        given = [value(count + to, 10 * rank + to, dtype) for to in range(size)]  # of other sizes to each
        got = [torch.empty(count + rank, dtype=dtype) for _ in range(size)]
        dist.all_to_all(got, given)
        for peer, part in enumerate(got):
            assert torch.equal(part.view(torch.uint8), value(count + rank, 10 * peer + rank, dtype).view(torch.uint8))

for rows in (1, 7, 5000):
    for width in (1, 33):
        given = value(size * rows * width, rank).view(-1, width)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given)
        for peer in range(size):
            wanted = value(size * rows * width, peer).view(-1, width)[rank * rows : (rank + 1) * rows]
            assert torch.equal(got[peer * rows : (peer + 1) * rows], wanted)
        splits = [(rank + 2 * to) % 3 * rows for to in range(size)]  # nothing for some
        expected = [(peer + 2 * rank) % 3 * rows for peer in range(size)]
        given = value(sum(splits) * width, rank).view(-1, width)
        base = torch.full((width, sum(expected)), -1.0)
        got = base.t()  # does not follow in memory
        dist.all_to_all_single(got, given, expected, splits)
        for peer in range(size):
            theirs = [(peer + 2 * to) % 3 * rows for to in range(size)]
            wanted = value(sum(theirs) * width, peer).view(-1, width)
            begin, at = sum(theirs[:rank]), sum(expected[:peer])
            assert torch.equal(got[at : at + expected[peer]], wanted[begin : begin + theirs[rank]])

for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
    for count in (1, 70_001):
        given = [value(count, rank + to).fmod(3) + 1 for to in range(size)]
        share = torch.empty(count)
        dist.reduce_scatter(share, given, op)
        stacked = torch.stack([value(count, peer + rank).fmod(3) + 1 for peer in range(size)])
        wanted = {dist.ReduceOp.SUM: stacked.sum(0), dist.ReduceOp.MAX: stacked.amax(0),
                  dist.ReduceOp.PRODUCT: stacked.prod(0)}[op]
        assert torch.equal(share, wanted), (op, count)
works = []
for turn in range(20):
    given = torch.full((size * 50,), float(turn))
    got = torch.empty_like(given)
    works.append((dist.all_to_all_single(got, given, async_op=True), got, turn))
for work, got, turn in reversed(works):
    work.wait()
    assert torch.all(got == turn)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        "",
        ", pg_options=Options(area_bytes=4096)",
        # gloo seems faster, and does not take all of these dtypes: what works must not depend on what was measured
        ", pg_options=Options(links=Links(engine=Link(1.0, 1e-9), memory=Link(1e6, 1.0)))",
    ],
)
def test_gathers_scatters_and_exchanges(num_ranks, options):
    imports = "from deepytorch.comm.topology.cost import Link, Links\n"
    run(imports + f"init(timeout=60{options})\n" + MOVES, num_ranks=num_ranks)


@pytest.mark.parametrize("engine_us", [1.0, 1e6])
def test_broadcasts_and_gathers_take_every_dtype_whatever_was_measured(engine_us):
    script = f"""
    from deepytorch.comm.topology.cost import Link, Links
    init(pg_options=Options(links=Links(engine=Link({engine_us}, 1e-9), memory=Link(1e3, 1e-3))))
    for dtype in (torch.int16, torch.complex64, torch.float8_e4m3fn, torch.bool):
        mine = torch.full((5,), 1.0 + rank).to(dtype)
        dist.broadcast(mine, 0)
        assert torch.equal(mine.view(torch.uint8), torch.ones(5).to(dtype).view(torch.uint8)), dtype
        whole = torch.empty(5 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole.view(torch.uint8), torch.ones(5 * size).to(dtype).view(torch.uint8)), dtype
    dist.destroy_process_group()
    """
    run(script)


def test_gathers_and_exchanges_between_hosts():
    script = """
    pretend_hosts(1)
    init(timeout=60)
    mine = torch.full((5,), float(rank))
    parts = [torch.empty(5) for _ in range(size)] if rank == 1 else None
    dist.gather(mine, parts, 1)
    if rank == 1:
        assert [part[0].item() for part in parts] == [0, 1]
    got = torch.empty(4)
    dist.all_to_all_single(got, torch.full((4,), float(rank)))
    assert got.tolist() == [0, 0, 1, 1]
    work = dist.all_reduce(torch.ones(4 << 20), async_op=True)
    dist.barrier()
    assert work.is_completed()
    dist.destroy_process_group()
    """
    run(script)
