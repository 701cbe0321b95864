"""Fewer bits between hosts: how far off, what is fed back, what overflows, and what is refused."""

from __future__ import annotations

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.mark.parametrize(("ranks_per_host", "num_ranks"), [(1, 2), (2, 4), (1, 3)])
def test_each_value_is_rounded_once_on_its_way_and_between_more_than_two_hosts_once_as_a_sum(ranks_per_host, num_ranks):
    script = f"""
    pretend_hosts({ranks_per_host})
    init()
    from deepytorch.comm import all_reduce, overflows
    per_host, num_hosts = {ranks_per_host}, {num_ranks // ranks_per_host}
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(size, 100_003, generator=generator)
    exact = values.double().sum(0)
    for name, step in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):  # half a unit in the last place, relative
        mine = values[rank].clone()
        work = all_reduce(mine, compress=name, async_op=True)
        work.wait()
        of_hosts = values.double().view(num_hosts, per_host, -1).sum(1).abs().sum(0)
        rounded = of_hosts + exact.abs() if num_hosts > 2 else of_hosts
        error = (mine.double() - exact).abs()
        assert (error <= step * rounded * 1.01 + 1e-6).all(), (name, error.max())
        assert error.max() > 0, "nothing was cast"
        again = torch.empty(size, *mine.shape)
        dist.all_gather_into_tensor(again.view(-1), mine)
        assert (again == mine).all(), "ranks ended with different sums"
        mean = values[rank].clone()
        all_reduce(mean, dist.ReduceOp.AVG, compress=name)
        assert (mean.double() - exact / size).abs().max() <= step * rounded.max() / size
    assert overflows() == 0
    # what two hosts of whole numbers can hold goes through unharmed
    for name in ("bf16", "fp16"):
        mine = torch.full((1001,), float(rank + 1))
        all_reduce(mine, compress=name)
        assert (mine == sum(range(1, size + 1))).all()
    dist.destroy_process_group()
    """
    run(script, num_ranks, 90)


def test_error_feedback_makes_up_for_what_fp8_loses():
    script = """
    pretend_hosts(1)
    init()
    from deepytorch.comm import all_reduce
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(size, 20_000, generator=generator) * torch.logspace(-2, 0, 20_000)
    exact, summed, once = values.sum(0), torch.zeros(20_000), None
    for step in range(1, 33):
        mine = values[rank].clone()
        all_reduce(mine, compress="fp8", key="weights")
        once = mine.clone() if once is None else once
        summed += mine
        if step in (1, 8, 32):
            error = ((summed / step - exact).norm() / exact.norm()).item()
            say(step, error)
            assert error < 0.05 / step + 1e-3, (step, error)  # what is owed stays, however many steps share it
    assert (once - exact).norm() / exact.norm() > 1e-3, "nothing was cast"
    # another key has no debts, and a payload of another size under a known key starts anew
    mine = values[rank].clone()
    all_reduce(mine, compress="fp8", key="others")
    assert torch.equal(mine, once)
    found = []
    for key in ("weights", "new"):
        mine = values[rank][:7_000].clone()
        all_reduce(mine, compress="fp8", key=key)
        found.append(mine)
    assert torch.equal(*found)
    dist.destroy_process_group()
    """
    run(script, 2, 90)


def test_what_fp16_cannot_hold_becomes_infinite_and_is_counted():
    script = """
    pretend_hosts(1)
    init()
    from deepytorch.comm import all_reduce, overflows
    mine = torch.ones(5_000)
    mine[[3, 4_999]] = 1e6
    all_reduce(mine, compress="fp16")
    assert torch.isinf(mine[[3, 4_999]]).all() and torch.isfinite(mine).sum() == 4_998
    counts = torch.tensor([overflows()])
    dist.all_reduce(counts)
    assert counts.item() >= 4, counts
    mine = torch.full((5_000,), 1e6)
    all_reduce(mine, compress="bf16")
    assert (mine - 2e6).abs().max() < 2e6 / 128
    dist.destroy_process_group()
    """
    assert "became infinite" in "".join(run(script, 2, 60))


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_sum_that_fp16_cannot_hold_is_infinite_where_it_is_cast(num_hosts):
    script = """
    pretend_hosts(1)
    init()
    from deepytorch.comm import all_reduce, overflows
    mine = torch.full((5_000,), 4e4)  # each fits, their sum does not
    all_reduce(mine, compress="fp16")
    expected = 8e4 if size == 2 else float("inf")  # two hosts cast no sum
    assert (mine == expected).all(), mine
    assert (overflows() > 0) == (size > 2)
    dist.destroy_process_group()
    """
    run(script, num_hosts, 60)


def test_on_one_host_nothing_is_cast():
    script = """
    init()
    from deepytorch.comm import all_reduce
    mine = torch.full((5_000,), 1.0 + 2.0**-20)
    all_reduce(mine, compress="bf16")
    assert (mine == 2.0 + 2.0**-19).all()
    dist.destroy_process_group()
    """
    run(script, 2, 60)


def test_arguments_that_make_no_sense_are_refused():
    script = """
    init()
    from deepytorch.comm import all_reduce
    ones = torch.ones(4, 4)
    for call, words in (
        (lambda: all_reduce(ones, compress="int4"), "expected None, 'bf16', 'fp16' or 'fp8'"),
        (lambda: all_reduce(ones, compress="fp8"), "error feedback"),
        (lambda: all_reduce(ones.t()[1:].t(), compress="bf16"), "contiguous"),
        (lambda: all_reduce(ones.long(), compress="bf16"), "expected SUM or AVG of float32"),
        (lambda: all_reduce(ones, dist.ReduceOp.MAX, compress="bf16"), "expected SUM or AVG"),
        (lambda: all_reduce(ones, compress="bf16", group=dist.new_group(backend="gloo")), '"deepytorch" backend'),
    ):
        error, _ = told(call)
        assert words in error, error
    dist.all_reduce(ones)  # the group is none the worse
    dist.destroy_process_group()
    """
    run(script, 2, 60)


def test_ranks_that_compress_differently_are_told_what_each_did():
    script = """
    pretend_hosts(2)
    init(timeout=10)
    from deepytorch.comm import all_reduce
    error, _ = told(lambda: all_reduce(torch.ones(1000), compress="bf16" if rank % 2 else "fp16"))
    assert "bf16 between hosts" in error and "fp16 between hosts" in error, error
    """
    run(script, 4, 60)


@pytest.mark.slow
def test_sums_of_half_precision_are_nearer_than_those_of_gloo():
    script = """
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(size, 100_000, generator=generator).bfloat16()
    exact = values.double().sum(0)
    errors = []
    for backend in ("deepytorch", "gloo"):
        init(backend, suffix=backend)
        mine = values[rank].clone()
        dist.all_reduce(mine)
        errors.append((mine.double() - exact).norm().item())
        dist.destroy_process_group()
    say(errors)
    assert errors[0] <= 0.7 * errors[1], errors
    """
    run(script, 8, 110)
