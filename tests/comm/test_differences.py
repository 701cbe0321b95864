"""What is refused before anything is sent, and calls in which ranks differ."""

from __future__ import annotations

import pytest

from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(240, func_only=True)


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
        error, _ = told(lambda: eval(call))
        assert "of no use" not in error and "disagree" not in error, (call, error)
        data = torch.full((1000,), float(number))
        dist.all_reduce(data)
        assert torch.all(data == size * number), call
        dist.all_reduce(data, dist.ReduceOp.PRODUCT)
    dist.destroy_process_group()
    """
    run(script)


# ---------------------------------------------------------------------- differences between ranks


# What rank 0 calls, what rank 1 calls, and words of the error.
DIFFERENT = [
    ("dist.all_reduce(torch.ones(1000))", "dist.all_reduce(torch.ones(1001))", ("1000 elements", "1001 elements")),
    ("dist.all_reduce(torch.ones(1 << 20))", "dist.all_reduce(ones(9))", ("1048576 elements", "9 elements")),
    ("dist.all_reduce(ones(9))", "dist.all_reduce(ones(9, dtype=torch.int32))", ("float32", "int32")),
    ("dist.all_reduce(ones(9))", "dist.all_reduce(ones(9), dist.ReduceOp.MAX)", ("SUM", "MAX")),
    ("dist.all_reduce(ones(9), dist.ReduceOp.PRODUCT)", "dist.all_reduce(ones(9))", ("PRODUCT", "SUM")),
    ("dist.all_reduce(ones(9))", "dist.broadcast(ones(9), 0)", ("all_reduce", "broadcast")),
    ("dist.all_reduce(ones(9))", "dist.barrier()", ("all_reduce", "barrier")),
    ("dist.broadcast(ones(9), 0)", "dist.broadcast(ones(9), 1)", ("root 0", "root 1")),
    ("dist.reduce(ones(9), 0)", "dist.reduce(ones(8), 0)", ("9 elements", "8 elements")),
    ("in_turn(1000, 2000)", "in_turn(2000, 1000)", ("1000 elements", "2000 elements")),
    (
        "dist.all_reduce_coalesced([ones(3), ones(5)])",
        "dist.all_reduce_coalesced([ones(5), ones(3)])",
        ("all_reduce_coalesced", "sizes"),
    ),
    ("dist.gather(ones(4), [ones(4), ones(4)])", "dist.gather(ones(6))", ("4 elements", "6 elements")),
    ("dist.scatter(ones(4), [ones(4), ones(4)])", "dist.scatter(ones(6))", ("4 elements", "6 elements")),
    (
        "dist.all_to_all_single(ones(5), ones(6), [2, 3], [2, 4])",
        "dist.all_to_all_single(ones(6), ones(6), [3, 3], [3, 3])",
        ("sends 16 bytes", "expects 12"),
    ),
    (
        "dist.reduce_scatter(ones(4), [ones(4)] * 2)",
        "dist.reduce_scatter(ones(5), [ones(5)] * 2)",
        ("8 elements", "10"),
    ),
    (
        "dist.all_gather([ones(2)] * 2, ones(2))",
        "dist.all_gather([ones(3)] * 2, ones(3))",
        ("2 elements", "3 elements"),
    ),
]


@pytest.mark.parametrize("late", [0, 1])
def test_a_difference_is_the_same_error_on_all_ranks_whoever_comes_late(late):
    script = f"""
    ones = torch.ones
    def in_turn(*counts):
        for work in [dist.all_reduce(ones(count), async_op=True) for count in counts]:
            work.wait()
    for number, calls in enumerate({[calls for *calls, _ in DIFFERENT]!r}):
        init(timeout=60, suffix=str(number))
        dist.all_reduce(ones(100))
        if rank == {late}:
            time.sleep(0.1)
        error, _ = told(lambda: eval(calls[rank]))
        say("found", error.split("Exception raised")[0].strip().splitlines()[0])
        dist.destroy_process_group()
    """
    outputs = run(script, timeout=60)
    one, other = ([line for line in output.splitlines() if line.startswith("found")] for output in outputs)
    assert one == other
    for error, (*_, named) in zip(one, DIFFERENT, strict=True):
        assert "ranks disagree on collective" in error or "sends" in error, error
        assert all(word in error for word in named), error


@pytest.mark.parametrize("ahead", [3, 200])
def test_a_call_that_was_handed_on_is_compared_however_far_one_rank_is_ahead(ahead):
    script = f"""
    init(timeout=60)
    def calls():
        works = []
        for number in range({ahead}):
            op = dist.ReduceOp.SUM if number == 1 and rank == 1 else dist.ReduceOp.PRODUCT
            with_engine = torch.ones(8, dtype=torch.int32)
            works.append(dist.reduce(with_engine, 0, op, async_op=True))  # gloo's own, as far ahead as one likes
        tell("made")
        dist.barrier()
    if rank == 1:
        hear("made")
    error, _ = told(calls)
    assert "disagree" in error, error
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
deadline = time.monotonic() + 20.0
while time.monotonic() < deadline:
    try:
        dist.barrier()
    except RuntimeError as error:
        say(str(error))
        break
    time.sleep(0.1)
else:
    raise SystemExit("nothing was said")
dist.destroy_process_group()
say("heard")
"""
# ranks, and ranks a host
TWO_HOSTS = [pytest.param(2, 1, id="2x1", marks=pytest.mark.slow), pytest.param(4, 2, id="2x2")]
FEW = "for _ in range(40): dist.broadcast(torch.ones(4), 0)"


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        pytest.param(
            "(lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.broadcast(torch.ones(8, dtype=torch.int32), 0))",
            ("broadcast(float32, 8 elements", "broadcast(int32, 8 elements"),
            id="dtype",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "(lambda: dist.reduce(torch.ones(8), 0), lambda: dist.reduce(torch.ones(8), 0, op=dist.ReduceOp.MAX))",
            ("reduce(float32, 8 elements, SUM", "reduce(float32, 8 elements, MAX"),
            id="reduction",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "(lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.reduce(torch.ones(8), 0))",
            ("broadcast(float32, 8 elements", "reduce(float32, 8 elements"),
            id="collective",
        ),
    ],
)
@pytest.mark.parametrize(("num_ranks", "per_host"), TWO_HOSTS)
def test_calls_that_differ_between_hosts_are_named_on_all_of_them(calls, named, num_ranks, per_host):
    """What gloo runs between hosts it runs with wrong numbers: the ranks hear of it all the same."""
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
deadline = time.monotonic() + 20.0
try:
    while time.monotonic() < deadline:
        dist.broadcast(torch.ones(64 if rank // {per_host} == 0 else 8), 0)
        time.sleep(0.1)
except RuntimeError as error:
    say("told:", error)
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
