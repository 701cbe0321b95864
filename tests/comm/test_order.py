"""Calls of a group are done in the order they were made in, whoever does them."""

from __future__ import annotations

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(240, func_only=True)


@pytest.mark.parametrize("options", ["", ", pg_options=Options(algorithm='engine')"])
def test_a_barrier_waits_for_what_was_started_before_it(options):
    script = f"""
    init(timeout=60{options})
    for turn in range(6):
        data = torch.ones(4 << 20)
        work = dist.all_reduce(data, async_op=True)
        dist.barrier()
        assert data[0] == size and data[-1] == size, turn
        work.wait()
    dist.destroy_process_group()
    """
    run(script)


def test_what_is_handed_on_comes_after_what_was_started_before_it():
    script = """
    init(timeout=60)
    for turn in range(5):
        data = torch.full((1 << 20,), 2.0)
        first = dist.all_reduce(data, async_op=True)  # 4 on both
        second = dist.all_reduce(data, dist.ReduceOp.PRODUCT, async_op=True)  # gloo's: 16
        third = dist.all_reduce(data, async_op=True)  # 32
        dist.barrier()
        assert torch.all(data == 32), (turn, data[:3])
        for work in (third, second, first):
            assert work.wait() and work.is_completed()
        [found] = dist.all_reduce(data, dist.ReduceOp.PRODUCT, async_op=True).get_future().wait()
        assert torch.all(found == 1024)
    dist.destroy_process_group()
    """
    run(script)


IN_TURN = pytest.mark.parametrize(
    "start",
    [
        "init(timeout=60)",
        "init(timeout=60, pg_options=Options(algorithm='engine'))",
        "pretend_hosts(1); init(timeout=60)",
    ],
    ids=["ours", "gloo", "hosts"],
)


@IN_TURN
def test_whatever_is_called_comes_after_what_was_started_before_it(start):
    """Lists, gathers, scatters and exchanges read what an asynchronous sum before them leaves."""
    script = f"""
    {start}
    def parts(): return [torch.empty(1 << 20) for _ in range(size)]
    one_host = {start!r}.startswith("init(timeout=60)")
    for name in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "all_to_all_single", "reduce"):
        if name == "all_to_all" and not one_host:
            continue  # gloo has none of lists
        data, out, outs = torch.ones(1 << 20), torch.empty(1 << 20), parts()
        first = dist.all_reduce(data, async_op=True)
        call = dict(
            all_gather=lambda: dist.all_gather(outs, data, async_op=True),
            reduce_scatter=lambda: dist.reduce_scatter(out, [data] * size, async_op=True),
            gather=lambda: dist.gather(data, outs if rank == 0 else None, 0, async_op=True),
            scatter=lambda: dist.scatter(out, [data] * size if rank == 0 else None, 0, async_op=True),
            all_to_all=lambda: dist.all_to_all(outs, [data] * size, async_op=True),
            all_to_all_single=lambda: dist.all_to_all_single(out, data, async_op=True),
            reduce=lambda: dist.reduce(data, 0, async_op=True),
        )[name]
        last = [call(), dist.all_reduce(data, async_op=True)][0]
        last.wait()
        found = dict(all_gather=outs, all_to_all=outs, gather=outs if rank == 0 else [], reduce=[]).get(name, [out])
        wanted = size * size if name == "reduce_scatter" else size
        assert all(torch.all(each == wanted) for each in found), (name, [each[:2] for each in found])
        dist.barrier()
    dist.destroy_process_group()
    """
    run(script, timeout=60)


@IN_TURN
def test_columns_are_read_and_written_in_their_turn(start):
    """gloo works on copies of them: made after what came before, and taken back before what comes after."""
    script = f"""
    {start}
    PRODUCT = dist.ReduceOp.PRODUCT  # gloo's, whatever is measured
    for turn in range(3):
        columns = torch.full((64, 1 << 14), 2.0)[:, ::2]
        works = [dist.all_reduce(columns, async_op=True)]  # 4
        works.append(dist.all_reduce(columns, PRODUCT, async_op=True))  # 16
        works.append(dist.all_reduce(columns, dist.ReduceOp.AVG, async_op=True))  # 16
        works.append(dist.all_reduce(columns, async_op=True))  # 32
        share = torch.empty(columns.shape[1], 32).t()
        works.append(dist.reduce_scatter_tensor(share, columns, PRODUCT, async_op=True))  # 1024
        works.append(dist.all_reduce(share, async_op=True))  # 2048
        works.append(dist.all_reduce_coalesced([share, columns], PRODUCT, async_op=True))
        works[-1].wait()
        assert torch.all(columns == 32 * 32) and torch.all(share == 2048 * 2048), (turn, columns[0, :3], share[0, :3])
        values = torch.full((1 << 20,), 4.0)
        first = dist.all_reduce(values, PRODUCT, async_op=True)  # 16
        second = dist.all_reduce(values, dist.ReduceOp.AVG, async_op=True)  # divided by whom it is handed to, or by us
        second.wait()
        assert torch.all(values == 16), values[:3]
        for work in works + [first]:
            work.wait()
        assert torch.all(columns == 32 * 32), "taken back once more, after what came later"
    dist.destroy_process_group()
    """
    run(script, timeout=60)


def test_a_monitored_barrier_names_who_is_missing_though_a_call_waits_for_him_too():
    script = """
    deepytorch.switch.SWITCH.enabled = True
    init("gloo", timeout=40)
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(1000), async_op=True)
        error, seconds = told(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)))
        assert "Rank 1 failed to pass monitoredBarrier" in error, error
        tell("over")
    hear("over")
    os._exit(0)
    """
    run(script, warm=False)


def test_a_message_passes_a_collective_that_waits_for_it():
    script = """
    init(timeout=20)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        dist.send(torch.full((3,), 7.0), 1)  # rank 1 comes to the collective once it has this
        work.wait()
    else:
        got = torch.zeros(3)
        dist.recv(got, 0)
        assert got.tolist() == [7, 7, 7]
        dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()
    """
    run(script)
