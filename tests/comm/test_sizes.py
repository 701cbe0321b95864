"""As large and as many as it gets: payloads beyond 4 GiB, 64 ranks of a host."""

from __future__ import annotations

import os

import pytest

from tests.comm.ranks import run

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400, func_only=True)]

_GIB = 1 << 30


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_payloads_beyond_4_gib() -> None:
    if _free_bytes() < 14 * _GIB:
        pytest.skip("needs 14 GiB of free memory")
    script = """
    init(timeout=200)
    count = (1 << 32) + 1001
    data = torch.full((count,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(data)
    assert data.min() == 3 and data.max() == 3
    data[-1] = 10 * rank + 7
    dist.broadcast(data, 1)
    assert data[-1] == 17 and data[:-1].max() == 3
    dist.destroy_process_group()
    """
    run(script, timeout=300)


def test_64_ranks_of_one_host() -> None:
    script = """
    init(timeout=250)
    for count in (1, 5_000, 300_001):
        data = torch.full((count,), float(rank))
        dist.all_reduce(data)
        assert data[0] == data[-1] == size * (size - 1) / 2
    got = torch.empty(64 * 3)
    dist.all_to_all_single(got, torch.arange(64.0).repeat_interleave(3) + 100 * rank)
    assert torch.equal(got, torch.arange(64.0).repeat_interleave(3) * 100 + rank)
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, num_ranks=64, timeout=300)
