"""Memory that `comm.allocate` hands out: the same sums, read in place, and clear words where it cannot be had."""

from __future__ import annotations

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(120, func_only=True)


def test_sums_in_place_at_any_offset_and_beside_other_memory():
    script = """
    from deepytorch.comm import allocate
    init(pg_options=Options(algorithm="shared_memory"))
    one, other = allocate(4 * 100_000).view(torch.float32), allocate(4 * 100_000).view(torch.float32)
    for begin, count in ((0, 100_000), (1, 99_998), (777, 3)):
        for op, wanted in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
            one.fill_(-5)
            mine = one[begin : begin + count].fill_(rank + 1)
            dist.all_reduce(mine, op)
            assert (mine == wanted).all() and (one == -5).sum() == 100_000 - count, (begin, count, op)
    # Not in place where the ranks' tensors lie differently, and right all the same.
    mine = (one if rank == 0 else other)[:5000].fill_(rank + 1)
    dist.all_reduce(mine)
    assert (mine == 3).all()
    mine = (one[:5000] if rank == 0 else torch.empty(5000)).fill_(rank + 1)
    dist.all_reduce(mine)
    assert (mine == 3).all()
    share = torch.empty(50_000)
    dist.reduce_scatter_tensor(share, one.copy_(torch.arange(100_000.0)))
    assert torch.equal(share, 2 * torch.arange(100_000.0)[rank * 50_000 : (rank + 1) * 50_000])
    whole = torch.empty(200_000)
    dist.all_gather_into_tensor(whole, other.fill_(rank))
    assert torch.equal(whole, torch.arange(2.0).repeat_interleave(100_000))
    kept = one[:10]
    del one, other  # a view keeps the memory
    dist.all_reduce(kept.fill_(rank + 1))
    assert (kept == 3).all()
    dist.destroy_process_group()
    kept.add_(1)  # and it outlives its group
    """
    run(script, 2, 60)


def test_what_cannot_be_allocated_is_said():
    script = """
    from deepytorch.comm import allocate
    init()
    error, _ = told(lambda: allocate(0))
    assert "allocate(0)" in error and "expected" in error, error
    error, _ = told(lambda: allocate(1 << 20, group=dist.new_group(backend="gloo")))
    assert "deepytorch" in error and "expected" in error, error
    dist.barrier()  # a rank that ended here would close connections of gloo's that the other is still opening
    dist.destroy_process_group()
    """
    run(script, 2, 60)
