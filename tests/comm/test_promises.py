"""What stock gloo keeps, our group keeps too: order, refusals, the caller's state, names, lifetimes."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from deepytorch.cli import app
from deepytorch.comm.group import native
from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(240, func_only=True)


# ---------------------------------------------------------------------- order


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
        assert "Rank 1 failed to pass monitoredBarrier" in error and seconds < 10, (error, seconds)
        open(os.environ["RENDEZVOUS"] + "-over", "w").close()
    while not os.path.exists(os.environ["RENDEZVOUS"] + "-over"):
        time.sleep(0.05)
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


# ---------------------------------------------------------------------- what only moves data

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


# ---------------------------------------------------------------------- refusals

REFUSED = [
    "dist.all_reduce(torch.ones(4, dtype=torch.int16))",
    "dist.all_reduce(ones, dist.ReduceOp.BAND)",
    "dist.reduce(torch.ones(4, dtype=torch.int16), 0)",
    "dist.reduce(ones, 9)",
    "dist.broadcast(ones, 5)",
    "dist.gather(ones, [torch.ones(3) for _ in range(size)] if rank == 0 else None, 0) if rank == 0 else refuse()",
    "dist.gather(ones, [ones] * 5 if rank == 0 else None, 0) if rank == 0 else refuse()",
    "dist.scatter(ones, [torch.ones(3) for _ in range(size)] if rank == 0 else None, 0) if rank == 0 else refuse()",
    "dist.all_gather([torch.ones(3) for _ in range(size)], ones)",
    "dist.all_gather([torch.ones(4)], ones)",
    "dist.reduce_scatter(ones, [torch.ones(3) for _ in range(size)])",
    "dist.reduce_scatter_tensor(torch.ones(4), torch.ones(7))",
    "dist.reduce_scatter_tensor(torch.ones(4, dtype=torch.int32), torch.ones(8, dtype=torch.int32), dist.ReduceOp.AVG)",
    "dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.AVG)",
    "dist.reduce_scatter_tensor(torch.ones(4, dtype=torch.int16), torch.ones(8, dtype=torch.int16))",
    "dist.all_gather_into_tensor(torch.ones(7), ones)",
    "dist.all_to_all_single(torch.ones(3), ones)",
    "dist.all_to_all_single(torch.ones(4), ones, [1, 1], [2, 2])",
    "dist.all_to_all_single(torch.ones(4).double(), ones)",
    "dist.all_to_all([torch.ones(3)] * 5, [torch.ones(3)] * 5)",
    "dist.all_reduce_coalesced([ones, ones.double()])",
    "dist.all_reduce(torch.ones(4), group=other)",
    "dist.all_gather([torch.ones(4, device='meta') for _ in range(size)], ones)",
]


@pytest.mark.parametrize("options", ["", ", pg_options=Options(algorithm='engine')"])
def test_what_is_refused_leaves_the_group_alive(options):
    script = f"""
    import warnings
    warnings.simplefilter("ignore")
    init(timeout=30{options})
    other = "no group"
    ones = torch.ones(4)
    def refuse():
        raise ValueError("the root alone sees it")
    for number, call in enumerate({REFUSED!r}):
        error, seconds = told(lambda: eval(call))
        assert seconds < 5 and "of no use" not in error and "disagree" not in error, (call, error)
        data = torch.full((1000,), float(number))
        dist.all_reduce(data)
        assert torch.all(data == size * number), call
        dist.all_reduce(data, dist.ReduceOp.PRODUCT)
    dist.destroy_process_group()
    """
    run(script)


# ---------------------------------------------------------------------- differences between ranks


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        (
            (
                "dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)])",
                "dist.all_reduce_coalesced([torch.ones(5), torch.ones(3)])",
            ),
            ("all_reduce_coalesced", "sizes"),
        ),
        (
            (
                "dist.gather(torch.ones(4), [torch.ones(4), torch.ones(4)])",
                "dist.gather(torch.ones(6))",
            ),
            ("4 elements", "6 elements"),
        ),
        (
            (
                "dist.scatter(torch.ones(4), [torch.ones(4), torch.ones(4)])",
                "dist.scatter(torch.ones(6))",
            ),
            ("4 elements", "6 elements"),
        ),
        (
            (
                "dist.all_to_all_single(torch.ones(5), torch.ones(6), [2, 3], [2, 4])",
                "dist.all_to_all_single(torch.ones(6), torch.ones(6), [3, 3], [3, 3])",
            ),
            ("sends 16 bytes", "expects 12"),
        ),
        (
            (
                "dist.reduce_scatter(torch.ones(4), [torch.ones(4)] * 2)",
                "dist.reduce_scatter(torch.ones(5), [torch.ones(5)] * 2)",
            ),
            ("8 elements", "10 elements"),
        ),
        (
            (
                "dist.all_gather([torch.ones(2)] * 2, torch.ones(2))",
                "dist.all_gather([torch.ones(3)] * 2, torch.ones(3))",
            ),
            ("2 elements", "3 elements"),
        ),
    ],
)
def test_sizes_that_differ_are_the_same_error_on_all_ranks(calls, named):
    script = f"""
    init(timeout=20)
    error, seconds = told(lambda: {calls[0]} if rank == 0 else {calls[1]})
    assert seconds < 5, seconds
    say("found", error)
    dist.destroy_process_group()
    """
    errors = [
        output.split("found", 1)[1].split("Exception raised")[0].strip().splitlines()[0] for output in run(script)
    ]
    assert errors[0] == errors[1]
    assert all(word in errors[0] for word in named), errors[0]


@pytest.mark.parametrize("ahead", [3, 200])
def test_a_call_that_was_handed_on_is_compared_however_far_one_rank_is_ahead(ahead):
    script = f"""
    init(timeout=20)
    mine = torch.ones(8)
    def calls():
        works = []
        for number in range({ahead}):
            op = dist.ReduceOp.SUM if number == 1 and rank == 1 else dist.ReduceOp.PRODUCT
            with_engine = torch.ones(8, dtype=torch.int32)
            works.append(dist.reduce(with_engine, 0, op, async_op=True))  # gloo's own, as far ahead as one likes
        dist.barrier()
    if rank == 1:
        time.sleep(1)
    error, seconds = told(calls)
    assert "disagree" in error, error
    assert seconds < 10, seconds
    dist.destroy_process_group()
    """
    run(script)


# ---------------------------------------------------------------------- the caller's state


def test_calls_under_inference_mode_work_on_our_threads():
    script = """
    init(timeout=30)
    with torch.inference_mode():
        tensors = [torch.ones(5), torch.ones(7)]
        work = dist.all_reduce_coalesced(tensors, async_op=True)
        work.wait()
        assert tensors[0][0] == size and tensors[1][-1] == size
        wide = torch.ones(6, 4).t()
        dist.all_reduce(wide, async_op=True).wait()
        assert torch.all(wide == size)
    def look(done):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), threading.get_ident() != here))
    seen, here = [], threading.get_ident()
    if rank == 1:
        time.sleep(0.5)  # rank 0 has hung its function on the future by then
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        end = dist.all_reduce(torch.ones(2_000), async_op=True).get_future().then(look)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    end.wait()
    assert seen == [(False, True, rank == 0)] or rank == 1 and seen[0][:2] == (False, True), seen
    dist.destroy_process_group()
    """
    run(script)


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(("asked", "answers"), [("gloo", "gloo"), ("deepytorch", "deepytorch"), ("nccl", "nccl")])
def test_a_group_answers_with_the_name_that_was_asked_for(asked, answers):
    script = f"""
    deepytorch.switch.SWITCH.enabled = True
    init({asked!r}, timeout=30)
    assert dist.get_backend() == {answers!r}, dist.get_backend()
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "Backend"
    data = torch.ones(10)
    dist.all_reduce(data)
    assert data[0] == size
    again = dist.new_group()
    assert dist.get_backend(again) == {answers!r}
    dist.all_reduce(data, group=again)
    assert data[0] == 2 * size
    if {asked!r} == "gloo":
        dist.monitored_barrier()
        dist.monitored_barrier(again)
        other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        other(torch.ones(2, 3)).sum().backward()
        assert other._get_ddp_logging_data()["backend_name"] == "gloo"
        if rank == 0:
            time.sleep(1)
        error, seconds = told(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.3)) if rank else refuse())
    dist.destroy_process_group()
    """
    run("def refuse():\n    raise ValueError()\n" + script.replace("\n    ", "\n"), warm=False)


def test_a_group_made_again_in_one_store_meets_no_stale_keys():
    script = """
    deepytorch.switch.SWITCH.enabled = True
    store = dist.FileStore(os.environ["RENDEZVOUS"], size)
    for turn in range(3):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        data = torch.full((3,), float(turn))
        dist.all_reduce(data)
        assert data[0] == size * turn
        dist.barrier()
        dist.destroy_process_group()
    """
    run(script, warm=False)


# ---------------------------------------------------------------------- lifetimes, threads, descriptors


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_descriptors_and_threads_of_a_group_are_few(num_ranks):
    script = """
    init(timeout=60)
    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    dist.all_reduce(torch.ones(1000), async_op=True).wait()
    groups = [dist.new_group(backend="deepytorch")]
    before = count()
    groups += [dist.new_group(backend="deepytorch") for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1000), async_op=True, group=group).wait()
        dist.barrier(group)
    found = [(after - now) / 4 for now, after in zip(before, count())]
    say("each group:", *found)
    assert found[0] <= 8 and found[1] <= 2.25, found  # the first group's own worker is counted here too
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    """
    run(script, num_ranks=num_ranks, warm=False, timeout=100)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("algorithm='engine'", 1),
        ("algorithm='streams', num_streams=4", 4),
        ("links=Links(engine=Link(100.0, 1e-2), network={1: Link(100.0, 1e-2), 2: Link(100.0, 2e-3)})", 2),
    ],
)
def test_hosts_are_connected_by_as_many_streams_as_the_table_names(options, wanted):
    script = f"""
    from deepytorch.comm.topology.cost import Link, Links
    from deepytorch.comm.group import backend
    asked = []
    class Counted(backend.Streams):
        def up_to(self, number):
            made = super().up_to(number)
            asked.append(len(made))
            return made
    backend.Streams = Counted
    pretend_hosts(1)
    init(timeout=60, pg_options=Options({options}))
    for count in (10, 1 << 20):
        data = torch.ones(count)
        dist.all_reduce(data)
        assert torch.all(data == size)
    assert asked == [{wanted}], asked
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script)


def test_groups_are_used_from_several_threads():
    script = """
    init(timeout=60)
    groups = [dist.new_group(backend="deepytorch") for _ in range(3)]
    wrong = []
    def work(number):
        try:
            for turn in range(60):
                data = torch.full((1 + 997 * (turn % 5),), float(number + turn))
                dist.all_reduce(data, group=groups[number], async_op=turn % 2 == 0)
                dist.barrier(groups[number])
                if not torch.all(data == size * (number + turn)):
                    wrong.append((number, turn))
        except Exception as error:
            wrong.append(error)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    dist.destroy_process_group()
    """
    run(script, warm=False)


@pytest.mark.parametrize("algorithm", ["", "engine"])
def test_a_thread_that_holds_the_interpreter_never_waits_for_one_that_waits_for_it(algorithm):
    """A call keeps its caller's hooks, Python objects: they must not be copied or dropped under a lock of ours."""
    script = f"""
    init(timeout=20{", pg_options=Options(algorithm='engine')" if algorithm else ""})
    group = dist.new_group(backend="deepytorch"{", pg_options=Options(algorithm='engine')" if algorithm else ""})
    ours = group._get_backend(torch.device("cpu"))
    over = threading.Event()
    def ask():  # with the interpreter's lock, for what the group's lock guards
        while not over.is_set():
            for _ in range(200):
                ours.inner_cpu
    thread = threading.Thread(target=ask)
    thread.start()
    sys.setswitchinterval(1e-4)
    columns = torch.ones(4, 6)[:, ::2]  # gloo gets a copy of it
    for turn in range(40):
        with torch.autograd.graph.saved_tensors_hooks(lambda given: given, lambda given: given):
            data = [torch.ones(100) for _ in range(4)]
            works = [dist.all_reduce(each, async_op=True, group=group) for each in data]
            works.append(dist.reduce(columns, 0, async_op=True, group=group))
            del data[2:]
        while not works[-1].is_completed():
            time.sleep(0)
        for work in works:
            work.wait()
        assert all(torch.all(each == size) for each in data)
    over.set()
    thread.join()
    dist.destroy_process_group()
    """
    run(script, warm=False, timeout=60)


def test_a_group_is_destroyed_beside_asynchronous_calls():
    script = """
    init(timeout=60)
    group = dist.new_group(backend="deepytorch")
    over = threading.Event()
    def submit():
        try:
            while not over.is_set():
                dist.all_reduce(torch.ones(3_000), group=group, async_op=True)
        except Exception:
            pass
    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    dist.destroy_process_group(group)
    over.set()
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - begin < 10
    """
    run(script, warm=False)


def test_a_process_ends_without_destroying_its_groups():
    script = """
    init(timeout=60)
    group = dist.new_group(backend="deepytorch")
    dist.all_reduce(torch.ones(1000), async_op=True)
    dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
    say("done")
    """
    for output in run(script, warm=False):
        assert "done" in output, output
        assert "terminate" not in output, output


# ---------------------------------------------------------------------- errors between hosts


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_reaches_all_hosts_while_the_failing_one_stays_alive(per_host):
    script = f"""
    pretend_hosts({per_host})
    init(timeout=60)
    dist.all_reduce(torch.ones(100))
    from deepytorch.comm.group.groups import group_of
    found = group_of()
    if rank == 0:
        started = time.monotonic()
        found.backend.abort()
        time.sleep(6)
    else:
        begin = time.monotonic()
        while not found.backend.poisoned and time.monotonic() - begin < 20:
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        assert found.backend.poisoned and seconds < 3, seconds
        assert "aborted" in found.backend.poison_message, found.backend.poison_message
        error, seconds = told(lambda: dist.all_reduce(torch.ones(100)))
        assert seconds < 1 and "aborted" in error, error
    """
    run(script, num_ranks=2 * per_host, warm=False)


def test_an_error_ends_a_call_that_waits_between_hosts_though_no_connection_closes():
    """A host of one rank has no segment to look at, and whose call is stuck in gloo closes nothing."""
    script = """
    pretend_hosts(1)
    init(timeout=60, pg_options=Options(algorithm="streams", num_streams=2))
    from deepytorch.comm.group.groups import group_of
    dist.all_reduce(torch.ones(100))
    heard = os.environ["RENDEZVOUS"] + "-heard"
    if rank == 0:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        time.sleep(1)
        group_of().backend.abort()
    elif rank == 1:
        error, seconds = told(lambda: dist.all_reduce(torch.ones(100_000)))
        assert "aborted" in error and seconds < 4, (error, seconds)
        open(heard, "w").close()
    while not os.path.exists(heard):  # rank 2 is alive, and in none of their calls
        time.sleep(0.05)
    os._exit(0)
    """
    run(script, num_ranks=3, warm=False, timeout=40)


def test_memory_outlives_a_failed_call_for_as_long_as_gloo_may_write_to_it():
    script = """
    pretend_hosts(1)
    import gc
    from torch.multiprocessing.reductions import StorageWeakRef
    from deepytorch.comm.group import backend, groups
    held = []  # so that no connection closes
    class Crossed(backend.Streams):  # what one rank sends of the second chunk the other one waits for elsewhere
        def up_to(self, number):
            held.extend(super().up_to(number))
            return held if rank == 0 else [held[0], held[2], held[1]]
    backend.Streams = Crossed
    init(timeout=60, pg_options=Options(algorithm="streams", num_streams=3, chunk_bytes=1 << 16))
    data = torch.ones(1 << 15)
    memory = StorageWeakRef(data.untyped_storage())
    work = dist.all_reduce(data, async_op=True)
    over = os.environ["RENDEZVOUS"] + "-over"
    if rank == 0:
        time.sleep(1)
        assert not work.is_completed()
        groups.group_of().backend.abort()
        error, seconds = told(work.wait)
        assert "aborted" in error, error
        del data, work
        gc.collect()
        time.sleep(0.3)
        assert not memory.expired()
        open(over, "w").close()
    while not os.path.exists(over):
        time.sleep(0.05)
    os._exit(0)
    """
    run(script, warm=False, timeout=40)


# ---------------------------------------------------------------------- the recorder


@pytest.mark.slow
def test_a_timeout_shows_what_every_rank_has_called_last():
    script = """
    init(timeout=2)
    dist.all_reduce(torch.ones(100))
    dist.broadcast(torch.ones(7), 0)
    if rank == 0:
        error, seconds = told(lambda: dist.all_reduce(torch.ones(1234)))
        assert "timed out" in error
    else:
        time.sleep(4)
    os._exit(0)
    """
    text = run(script, warm=False)[0]
    assert "have called last" in text, text
    assert all(words in text for words in ("local rank 1", "broadcast(float32, 7 elements, root 0", "1234 elements")), (
        text
    )


def test_the_recorder_is_read_from_another_process():
    script = """
    init(timeout=30)
    for _ in range(3):
        dist.all_reduce(torch.ones(77))
    dist.barrier()
    say("ready", os.getpid())
    time.sleep(20)
    """
    with Ranks(script) as ranks:
        ranks.until(0, "ready")
        ranks.until(1, "ready")
        shown = CliRunner().invoke(app, ["doctor", "--group", ranks.output(0).split("ready", 1)[1].split()[0]])
    assert shown.exit_code == 0, shown.output
    assert all(words in shown.output for words in ("local rank 1", "77 elements", "barrier")), shown.output


# ---------------------------------------------------------------------- determinism, sizes


@pytest.mark.slow
def test_deterministic_algorithms_take_the_choice_that_is_not_measured():
    script = """
    torch.use_deterministic_algorithms(rank < 5)
    init(timeout=30)
    from deepytorch.comm import chosen
    found = [chosen(num_bytes=1 << power) for power in range(10, 24)]
    data = torch.randn(300_001, generator=torch.Generator().manual_seed(rank))
    half = data.bfloat16()
    dist.all_reduce(data)
    dist.all_reduce(half)
    import hashlib
    say("bits", hashlib.sha256(data.numpy().tobytes() + half.view(torch.int16).numpy().tobytes()).hexdigest(), found)
    dist.destroy_process_group()
    """
    found = {output.split("bits", 1)[1].strip() for _ in range(2) for output in run(script, num_ranks=3)}
    assert len(found) == 1, found


def test_each_rank_reserves_its_own_memory():
    """So that its pages come from what is near to its processor; the first rank reserves none of the others'."""
    module = native.load()
    first = module.Segment.create(num_ranks=2, areas=3, area_bytes=1 << 20)

    def reserved():
        return os.stat(f"/proc/self/fd/{first.descriptor}").st_blocks * 512

    alone = reserved()
    second = module.Segment.attach(os.getpid(), first.descriptor, first.token, 1)
    assert 3 << 20 <= alone < 4 << 20
    assert reserved() - alone == 3 << 20
    assert second.num_bytes == first.num_bytes == 6 << 20


def test_who_waits_on_the_future_of_a_call_that_was_handed_on_hears_what_the_ranks_differed_in():
    script = """
    init(timeout=4)
    given = [torch.ones(3, dtype=torch.float32 if rank == 0 else torch.bfloat16)]
    if rank == 1:
        time.sleep(1)  # rank 0 has asked gloo before it can know
    def call():
        dist.all_reduce_coalesced(given, op=dist.ReduceOp.PRODUCT, async_op=True).wait()
    error, seconds = told(call)
    assert "disagree" in error and "float32" in error and "BFloat16" in error.replace("bfloat16", "BFloat16"), error
    assert seconds < 15
    """
    run(script)


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
        time.sleep(1)  # rank 0 has asked gloo before it can know
    error, seconds = told(lambda: scatter(torch.float32 if rank == 0 else torch.bfloat16, True)[1].wait())
    assert "disagree" in error, error
    assert seconds < 8, seconds
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
called = os.environ["RENDEZVOUS"] + "-called"
def call(group=None, awaited=True):  # once all others wait for theirs, the last rank makes another one
    if last:
        while not all(os.path.exists(f"{called}{other}") for other in range(size - 1)):
            time.sleep(0.05)
    work = dist.all_reduce_coalesced(given, op=dist.ReduceOp.PRODUCT, group=group, async_op=True)
    if awaited:
        open(f"{called}{rank}", "w").close()
    return work
def is_of_both(error):
    return "disagree" in error and "float32" in error and "bfloat16" in error.lower()
"""


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_future_hears_of_the_poison_long_before_the_timeout(num_ranks):
    script = """
    error, seconds = told(lambda: call().wait())
    assert is_of_both(error), error
    assert seconds < 5, seconds
    error, seconds = told(lambda: dist.all_reduce(torch.ones(1)))
    assert "of no use" in error and seconds < 1
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 5
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
                error, seconds = told(future.wait)
                seen.append((seconds, is_of_both(error), torch.is_grad_enabled()))
        ends = [future.then(after) for future in futures[:2]]
        begin = time.monotonic()
        for end in ends:
            end.wait()
        assert time.monotonic() - begin < 5 and len(seen) == 6, seen
        assert all(heard and not grad for _, heard, grad in seen), seen
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
        begin = time.monotonic()
        future = call(other)
        ends = future.then(lambda done: seen.append(told(done.value)[0]))
        dist.destroy_process_group(other)
        del other
        gc.collect()
        ends.wait()
        error, seconds = told(future.wait)
        assert is_of_both(error) and is_of_both(seen[0]) and time.monotonic() - begin < 8, (error, seen)
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
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    future = dist.all_reduce_coalesced([torch.ones(3)], op=dist.ReduceOp.PRODUCT, async_op=True)
    error, seconds = told(future.wait)
    assert "failed in the inner backend" in error and "all_reduce_coalesced" in error, error
    assert seconds < 6, seconds
    say("heard")
    os._exit(0)
    """
    with Ranks(script, num_ranks) as ranks:
        outcomes = ranks.wait(40)
    for outcome in outcomes[:-1]:
        assert outcome.code == 0, outcome.output
        assert "heard" in outcome.output, outcome.output


def test_a_future_of_a_call_that_was_handed_on_is_quick_and_right():
    script = """
    init(timeout=60)
    def count():
        names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        ours = [name for name in names if "gloo" not in name]  # gloo starts its own as it needs them
        return len(os.listdir("/proc/self/fd")), len(ours)
    dist.all_reduce(torch.ones(1000), async_op=True).wait()  # the group's own worker
    before = count()
    spent = []
    for turn in range(50):
        wide = torch.full((6, 4), float(rank + turn)).t()  # gloo works on a copy of it
        dist.barrier()
        begin = time.monotonic()
        future = dist.all_reduce_coalesced([wide, torch.ones(3)], dist.ReduceOp.PRODUCT, async_op=True)
        doubled = future.then(lambda done: [2 * each for each in done.value()])
        found = future.wait()
        spent.append(time.monotonic() - begin)
        expected = turn * (turn + 1)
        assert torch.all(wide == expected) and torch.all(found[0] == expected) and found[0].shape == (4, 6)
        assert torch.all(doubled.wait()[0] == 2 * expected)
    assert sorted(spent)[25] < 0.02, sorted(spent)
    after = count()
    assert after[0] <= before[0], (before, after)
    assert after[1] <= before[1] + 1, (before, after)  # the thread that looks, one in a process
    idle = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - idle < 0.1, "something is looked at while nothing is pending"
    dist.destroy_process_group()
    """
    run(script)


# ---------------------------------------------------------------------- calls that differ between hosts

DIFFERS = """
pretend_hosts({per_host})
init(timeout=60.0)
{before}
dist.barrier()
call = {calls}[rank // {per_host}]
try:
    call()
except RuntimeError:
    pass  # some are known while they run
begun = time.monotonic()
while time.monotonic() - begun < 5.0:
    try:
        dist.barrier()
    except RuntimeError as error:
        say(str(error))
        break
    time.sleep(0.1)
else:
    raise SystemExit("nothing was said")
assert time.monotonic() - begun < 3.0, time.monotonic() - begun
dist.destroy_process_group()
say("heard")
"""
# ranks, and ranks a host
TWO_HOSTS = [pytest.param(2, 1, id="2x1", marks=pytest.mark.slow), pytest.param(4, 2, id="2x2")]
FEW = "for _ in range(40): dist.broadcast(torch.ones(4), 0)"


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        (
            "(lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.broadcast(torch.ones(8, dtype=torch.int32), 0))",
            ("broadcast(float32, 8 elements", "broadcast(int32, 8 elements"),
        ),
        (
            "(lambda: dist.reduce(torch.ones(8), 0), lambda: dist.reduce(torch.ones(8), 0, op=dist.ReduceOp.MAX))",
            ("reduce(float32, 8 elements, SUM", "reduce(float32, 8 elements, MAX"),
        ),
        (
            "(lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.reduce(torch.ones(8), 0))",
            ("broadcast(float32, 8 elements", "reduce(float32, 8 elements"),
        ),
    ],
    ids=["dtype", "reduction", "collective"],
)
@pytest.mark.parametrize(("num_ranks", "per_host"), TWO_HOSTS)
def test_calls_that_differ_between_hosts_are_named_on_all_of_them(calls, named, num_ranks, per_host):
    """What gloo runs between hosts it runs with wrong numbers: the ranks hear of it within two seconds."""
    script = DIFFERS.format(per_host=per_host, calls=calls, before=FEW)
    for said in run(script, num_ranks, timeout=60.0, warm=False):
        assert "ranks disagree on collective 42 of this group: rank 0 called " in said, said
        assert all(each in said for each in named), said


@pytest.mark.parametrize(("num_ranks", "per_host"), TWO_HOSTS)
def test_sizes_that_differ_between_hosts_are_named_on_all_ranks_though_gloo_ends_one(num_ranks, per_host):
    """gloo ends a process that gets more bytes than it expects, from a thread of its own: not before all know why."""
    script = f"""
pretend_hosts({per_host})
init(timeout=60.0)
for _ in range(40):
    dist.broadcast(torch.ones(4), 0)
time.sleep(1.2)  # what rank 0 has told of its calls ends here
begun = time.monotonic()
try:
    while time.monotonic() - begun < 10.0:
        dist.broadcast(torch.ones(64 if rank // {per_host} == 0 else 8), 0)
        time.sleep(0.1)
except RuntimeError as error:
    say("told:", error)
say("after", time.monotonic() - begun)
"""
    with Ranks(script, num_ranks) as ranks:
        outcomes = ranks.wait(60)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code is not None, (rank, outcome.output)
        assert "rank 0 called broadcast(float32, 64 elements" in outcome.output, (rank, outcome.output)
        assert "called broadcast(float32, 8 elements" in outcome.output, (rank, outcome.output)


@pytest.mark.slow
def test_calls_that_are_alike_between_hosts_are_left_alone():
    """Far ahead, behind, in many of them, and with parts whose sizes may differ."""
    run(
        """
        pretend_hosts(2)
        init()
        for number in range(3):
            if rank == 3:
                time.sleep(0.7)
            works = [dist.broadcast(torch.ones(4), 0, async_op=True) for _ in range(1500)]
            works.append(dist.all_reduce(torch.ones(1 << 18), async_op=True))
            for work in works:
                work.wait()
            mine = torch.ones(rank + 1, 2)
            sizes = [1 if rank == 0 and other == 0 else 0 for other in range(4)]
            dist.all_to_all_single(torch.empty(sum(sizes), 2), mine[: sum(sizes)], sizes, sizes)
            dist.gather(mine[:1], [torch.empty(1, 2) for _ in range(4)] if rank == 1 else None, 1)
            dist.all_gather_object([None] * 4, "x" * rank)
        time.sleep(1.2)
        dist.barrier()
        dist.destroy_process_group()
        """,
        num_ranks=4,
        timeout=120.0,
    )
