"""The futures of calls that were handed on to gloo, and its reduce_scatter."""

from __future__ import annotations

import pytest

from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(240, func_only=True)


@pytest.mark.parametrize("form", ["list", "tensor", "coalesced"])
def test_a_reduce_scatter_that_gloo_runs_hears_of_the_poison(form):
    """gloo's own work of it waits for all-reduces without a deadline."""
    script = """
    init(timeout=60)
    from torch.distributed.distributed_c10d import _coalescing_manager
    def scatter(dtype, async_op):
        whole, part = torch.ones(4, dtype=dtype), torch.empty(2, dtype=dtype)
        if FORM == "list":
            return part, dist.reduce_scatter(part, list(whole.chunk(2)), op=dist.ReduceOp.PRODUCT, async_op=async_op)
        if FORM == "tensor":
            return part, dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.PRODUCT, async_op=async_op)
        with _coalescing_manager(async_ops=True) as manager:
            dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.PRODUCT)
            dist.reduce_scatter_tensor(torch.empty(1, dtype=dtype), whole[:2].clone(), op=dist.ReduceOp.PRODUCT)
        return part, manager
    part, work = scatter(torch.float32, True)
    work.wait()
    assert part.tolist() == [1.0, 1.0]
    if rank == 1:
        hear("asked")  # rank 0 has asked gloo before it can know
    def differs():
        work = scatter(torch.float32 if rank == 0 else torch.bfloat16, True)[1]
        tell("asked")
        work.wait()
    error, _ = told(differs)
    assert "disagree" in error, error
    """
    run(script.replace("FORM", repr(form)))


def test_a_reduce_scatter_that_gloo_runs_is_right_wherever_its_tensors_lie():
    script = """
    init(timeout=60)
    given = torch.arange(24, dtype=torch.float64).reshape(4, 6) + rank
    out = torch.zeros(3, 4, dtype=torch.float64).t()  # (4, 3), not contiguous
    work = dist.reduce_scatter_tensor(out, given.clone(), op=dist.ReduceOp.PRODUCT, async_op=True)
    work.wait()
    product = (torch.arange(24) * (torch.arange(24) + 1)).double()
    assert torch.equal(out.reshape(-1), product.chunk(2)[rank]), out
    parts = [torch.full((3,), float(rank + 2)).expand(2, 3).t() for _ in range(2)]
    for reduce, wanted in ((dist.ReduceOp.PRODUCT, 6.0), (dist.ReduceOp.AVG, 2.5), (dist.ReduceOp.MAX, 3.0)):
        half = torch.zeros(2, 3).t()
        dist.reduce_scatter(half, parts, op=reduce)
        assert torch.all(half == wanted), (reduce, half)
    work = dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), op=dist.ReduceOp.PRODUCT, async_op=True)
    assert [each.tolist() for each in work.get_future().wait()] == [[1.0, 1.0]]
    error, _ = told(lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4), op=dist.ReduceOp.PRODUCT))
    assert "an input of 2 times the output" in error, error
    dist.all_reduce(out)
    dist.destroy_process_group()
    """
    run(script)


# What rank 0 asks gloo for, before it can know that the last rank differs.
_FUTURE_OF_A_DIFFERENCE = """
init(timeout=60)
last = rank == size - 1
given = [torch.ones(3, dtype=torch.bfloat16 if last else torch.float32)]
def call(group=None, awaited=True):  # once all others wait for theirs, the last rank makes another one
    if last:
        for other in range(size - 1):
            hear(f"called {other}")
    work = dist.all_reduce_coalesced(given, op=dist.ReduceOp.PRODUCT, group=group, async_op=True)
    if awaited:
        tell(f"called {rank}")
    return work
def is_of_both(error):
    return "disagree" in error and "float32" in error and "bfloat16" in error.lower()
"""


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_future_hears_of_the_poison_long_before_the_timeout(num_ranks):
    script = """
    error, _ = told(lambda: call().wait())
    assert is_of_both(error), error
    error, _ = told(lambda: dist.all_reduce(torch.ones(1)))
    assert "of no use" in error
    dist.destroy_process_group()
    """
    run(_FUTURE_OF_A_DIFFERENCE + script.replace("\n    ", "\n"), num_ranks=num_ranks)


def test_what_hangs_on_a_future_that_the_poison_ends_may_wait_for_another_one():
    script = """
    if last:
        error, seconds = told(call)
    else:
        with torch.no_grad():
            futures = [call(awaited=number == 2) for number in range(3)]
        seen = []
        def after(done):
            for future in futures:
                error, _ = told(future.wait)
                seen.append((is_of_both(error), torch.is_grad_enabled()))
        ends = [future.then(after) for future in futures[:2]]
        for end in ends:
            end.wait()
        assert seen == [(True, False)] * 6, seen
    """
    run(_FUTURE_OF_A_DIFFERENCE + script.replace("\n    ", "\n"))


def test_a_future_outlives_its_group_and_still_hears():
    script = """
    import gc
    other = dist.new_group(backend="deepytorch")
    if last:
        error, seconds = told(lambda: call(other))
    else:
        seen = []
        future = call(other)
        ends = future.then(lambda done: seen.append(told(done.value)[0]))
        dist.destroy_process_group(other)
        del other
        gc.collect()
        ends.wait()
        error, seconds = told(future.wait)
        assert is_of_both(error) and is_of_both(seen[0]), (error, seen)
    say("done")
    """
    for output in run(_FUTURE_OF_A_DIFFERENCE + script.replace("\n    ", "\n"), warm=False):
        assert "done" in output, output
        assert "terminate" not in output, output


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_future_hears_of_a_rank_that_was_killed(num_ranks):
    script = """
    init(timeout=60)
    dist.barrier()
    if rank == size - 1:
        for other in range(size - 1):
            hear(f"called {other}")
        os.kill(os.getpid(), signal.SIGKILL)
    future = dist.all_reduce_coalesced([torch.ones(3)], op=dist.ReduceOp.PRODUCT, async_op=True)
    tell(f"called {rank}")
    error, _ = told(future.wait)
    assert "failed in the inner backend" in error and "all_reduce_coalesced" in error, error
    say("heard")
    os._exit(0)
    """
    with Ranks(script, num_ranks) as ranks:
        outcomes = ranks.wait(40)
    for outcome in outcomes[:-1]:
        assert outcome.code == 0, outcome.output
        assert "heard" in outcome.output, outcome.output


def test_a_future_of_a_call_that_was_handed_on_is_right_and_leaves_nothing_running():
    script = """
    init(timeout=60)
    def count():
        names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        ours = [name for name in names if "gloo" not in name]  # gloo starts its own as it needs them
        return len(os.listdir("/proc/self/fd")), len(ours)
    dist.all_reduce(torch.ones(1000), async_op=True).wait()  # the group's own worker
    before = count()
    for turn in range(50):
        wide = torch.full((6, 4), float(rank + turn)).t()  # gloo works on a copy of it
        dist.barrier()
        future = dist.all_reduce_coalesced([wide, torch.ones(3)], dist.ReduceOp.PRODUCT, async_op=True)
        doubled = future.then(lambda done: [2 * each for each in done.value()])
        found = future.wait()
        expected = turn * (turn + 1)
        assert torch.all(wide == expected) and torch.all(found[0] == expected) and found[0].shape == (4, 6)
        assert torch.all(doubled.wait()[0] == 2 * expected)
    after = count()
    assert after[0] <= before[0], (before, after)
    assert after[1] <= before[1] + 1, (before, after)  # the thread that looks, one in a process
    idle = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - idle < 0.1, "something is looked at while nothing is pending"
    dist.destroy_process_group()
    """
    run(script)
