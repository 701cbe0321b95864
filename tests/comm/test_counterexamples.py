"""Calls that once gave wrong numbers, hung or crashed, each as it was found."""

from __future__ import annotations

import pytest

from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(120, func_only=True)


def test_an_average_on_gloo_keeps_its_place_among_other_calls():
    script = """
    init(timeout=10, pg_options=Options(algorithm="engine"))
    for step in range(100):
        a, b = torch.full((1000,), 2.0 * (rank + 1)), torch.full((1000,), 100.0)
        if (step + rank) % 2:
            time.sleep(0.001)
        work = dist.all_reduce(a, dist.ReduceOp.AVG, async_op=True)
        dist.all_reduce(b)
        work.wait()
        assert torch.all(a == 3) and torch.all(b == 200), (step, a[0], b[0])
    dist.destroy_process_group()
    """
    run(script)


def test_a_mismatch_far_ahead_of_what_runs_is_an_error():
    script = """
    init(timeout=10, pg_options=Options(algorithm="shared_memory"))
    dist.all_reduce(torch.ones(4))
    tensors = [torch.full((8,), float(rank + 1)) for _ in range(200)]
    if rank == 1:
        hear("all made")
    def all_of_them():
        works = [
            dist.all_reduce(tensor, dist.ReduceOp.MAX if rank == 0 and index < 20 else dist.ReduceOp.SUM, async_op=True)
            for index, tensor in enumerate(tensors)
        ]
        tell("all made")
        for work in works:
            work.wait()
    error, _ = told(all_of_them)
    assert "ranks disagree" in error and "MAX" in error and "SUM" in error, error
    dist.destroy_process_group()
    """
    run(script)


def test_many_in_flight_on_shared_and_on_plain_memory():
    script = """
    init(timeout=20, pg_options=Options(algorithm="shared_memory"))
    from deepytorch.comm import allocate
    count = 1 << 10
    shared = allocate(4 * count * 7).view(torch.float32)
    for step in range(20):
        shared.fill_(1.0)
        dist.barrier()
        tensors = [
            shared[index // 3 * count : index // 3 * count + count]
            if index % 3 == 0 and index // 3 < 7
            else torch.ones(1 + index * 5 % 11)
            for index in range(210)
        ]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        assert all(torch.all(tensor == 2) for tensor in tensors), step
    dist.destroy_process_group()
    """
    run(script)


def test_in_place_waits_for_what_was_queued_before():
    script = """
    init(timeout=10, pg_options=Options(algorithm="shared_memory"))
    from deepytorch.comm import allocate
    shared = allocate(4 << 18).view(torch.float32)
    for step in range(30):
        shared.fill_(5.0 if rank == 0 else -7.0)
        dist.barrier()
        works = [dist.broadcast(shared, 0, async_op=True), dist.all_reduce(shared, async_op=True)]
        for work in works:
            work.wait()
        assert torch.all(shared == 10), step
        dist.barrier()
    dist.destroy_process_group()
    """
    run(script)


@pytest.mark.parametrize("option", ["one_shot_bytes", "area_bytes", "chunk_bytes"])
def test_ranks_that_were_told_different_things_disagree(option):
    script = f"""
    init(timeout=10, pg_options=Options(algorithm="shared_memory", {option}=[4096, 8192][rank]))
    data = torch.ones(4_000)
    {"assert torch.all(data == 1)" if option != "area_bytes" else ""}
    try:
        dist.all_reduce(data)
    except Exception as error:
        assert "ranks disagree" in str(error) and "plan" in str(error), error
    else:  # the segment of a host has one size, that of its first rank
        assert "{option}" == "area_bytes" and torch.all(data == 2), data
    dist.destroy_process_group()
    """
    run(script)


def test_bf16_payloads_keep_their_range_where_fp16_is_allowed():
    script = """
    pretend_hosts(1)
    init(timeout=10, pg_options=Options(algorithm="streams", compress="fp16"))
    data = torch.full((1000,), 1e5, dtype=torch.bfloat16)
    dist.all_reduce(data)
    assert torch.all(data == torch.tensor(2e5, dtype=torch.bfloat16)), data[0]
    dist.destroy_process_group()
    """
    run(script)


def test_fp8_keeps_the_tiniest_numbers_finite():
    script = """
    pretend_hosts(1)
    from deepytorch.comm import all_reduce
    init(timeout=10, pg_options=Options(algorithm="streams"))
    data = torch.zeros(64)
    data[0], data[1], data[2] = 1e-39, 1e-41, -3e-40
    all_reduce(data, compress="fp8", key="tiny")
    assert torch.isfinite(data).all() and data[0] > 0 > data[2], data[:4]
    dist.destroy_process_group()
    """
    run(script)


def test_futures_may_be_asked_for_while_they_are_settled():
    script = """
    init(timeout=20, pg_options=Options(algorithm="shared_memory"))
    for step in range(10):
        if rank == 1:
            time.sleep(0.02)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        future = work.get_future().then(lambda f: sum(range(2000)))
        while not future.done():
            work.get_future()
    dist.destroy_process_group()
    """
    run(script, warm=False)


@pytest.mark.slow
def test_destroying_beside_a_thread_in_a_collective():
    # by an algorithm of ours: where measuring has chosen gloo, gloo says that a connection was closed
    script = """
    init(timeout=60, pg_options=Options(algorithm="shared_memory"))
    dist.all_reduce(torch.ones(10))
    if rank == 0:
        def waiting():
            try:
                dist.all_reduce(torch.ones(1000))
            except Exception as error:
                say("ended", error)
        thread = threading.Thread(target=waiting)
        thread.start()
        time.sleep(0.3)  # by then it waits
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        dist.destroy_process_group()
        thread.join(5)
        assert not thread.is_alive()
        error, _ = told(work.wait)
        assert "destroyed" in error, error
        tell("over")
    hear("over")
    """
    run(script, warm=False)


@pytest.mark.slow
def test_a_death_behind_a_slow_rank_is_seen_at_once():
    script = """
    init(timeout=30)
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        hear("seen")
    error, _ = told(lambda: dist.all_reduce(torch.ones(4)))
    assert "local rank 2 has died" in error, error
    tell("seen")
    dist.destroy_process_group()
    """
    with Ranks(script, 3) as ranks:
        outcomes = ranks.wait(30)
    assert [outcome.code for outcome in outcomes[:2]] == [0, 0], outcomes


def test_sparse_tensors_go_to_gloo():
    script = """
    import warnings
    warnings.simplefilter("ignore")
    init()
    data = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
    dist.all_reduce(data)
    assert data.to_dense().tolist() == [1, 1, 0, 0]
    dist.destroy_process_group()
    """
    run(script)


def test_a_host_that_cannot_measure_its_memory_holds_up_nobody():
    script = """
    pretend_hosts(2)
    from deepytorch.comm.group import link_costs
    share, calls = link_costs.share_segment, []
    def failing(*arguments, **named):
        calls.append(1)
        segment = share(*arguments, **named)
        return None if rank < 2 else segment
    link_costs.share_segment = failing
    init(timeout=10)
    data = torch.ones(100_000)
    dist.all_reduce(data)
    assert torch.all(data == 4)
    assert len(calls) == 1
    dist.destroy_process_group()
    """
    run(script, num_ranks=4, env={"DEEPYTORCH_LINKS": "measure"})


@pytest.mark.parametrize("algorithm", ["engine", "shared_memory"])
def test_outputs_whose_elements_share_memory(algorithm):
    script = f"""
    init(timeout=10, pg_options=Options(algorithm="{algorithm}"))
    def wide(value=None):  # three elements, four times each
        return torch.full((3,), rank + 1.0 if value is None else value).expand(4, 3)
    def ranks(first):
        return torch.cat([torch.full((2, 3), first), torch.full((2, 3), first + 1)])
    def all_goes_on():
        found = torch.ones(2)
        dist.all_reduce(found)
        assert found.tolist() == [2, 2], found
    for async_op in (False, True):
        def done(work):
            if async_op:
                work.wait()
        found = wide()
        done(dist.all_reduce(found, async_op=async_op))
        assert torch.all(found == 3), found
        done(dist.all_reduce(found, dist.ReduceOp.AVG, async_op=async_op))
        assert torch.all(found == 3), found
        found = wide()
        done(dist.broadcast(found, 1, async_op=async_op))
        assert torch.all(found == 2), found
        found = wide()
        done(dist.reduce(found, 0, async_op=async_op))
        assert rank != 0 or torch.all(found == 3), found
        found = wide()
        given = [torch.full((4, 3), 5.0 + k) for k in range(2)] if rank == 0 else None
        done(dist.scatter(found, given, async_op=async_op))
        assert torch.all(found == 5 + rank), found
        found = wide()  # of several values for one place the first
        done(dist.all_to_all_single(found, ranks(5.0 + rank), async_op=async_op))
        assert torch.all(found == 5 + rank), found
        # what gloo itself refuses once the ranks are done with each other
        other = torch.arange(12.0).view(4, 3) + rank
        for call in (
            lambda: dist.all_gather([wide(), wide()], other, async_op=async_op),
            lambda: dist.all_reduce_coalesced([wide(), torch.ones(2)], async_op=async_op),
            lambda: dist.reduce_scatter(wide(), [other, other], async_op=async_op),
            lambda: dist.gather(other, [wide(), wide()] if rank == 0 else None, async_op=async_op),
        ):
            try:
                done(call())
                raised = False
            except RuntimeError as error:
                assert "refers to a single memory location" in str(error), error
                raised = True
            assert raised or rank == 1, call
            all_goes_on()
    read = torch.empty(8, 3)
    dist.all_gather_into_tensor(read, wide())
    assert read[:, 0].tolist() == [1] * 4 + [2] * 4
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        error, _ = told(lambda: call(freed))
        assert "without memory" in error, error
        all_goes_on()
    with torch.inference_mode():
        made_there = torch.zeros(3, 4).t()
    dist.all_to_all_single(made_there, torch.arange(12.0).view(4, 3) + rank)
    assert made_there[:2].tolist() == [[6.0 * rank + k for k in row] for row in ((0, 1, 2), (3, 4, 5))]
    all_goes_on()
    dist.destroy_process_group()
    """
    run(script)


@pytest.mark.parametrize("count", [1000, 3_000_000])  # the second in several turns
def test_inputs_that_lie_in_their_output(count):
    script = f"""
    init(timeout=20, pg_options=Options(algorithm="shared_memory"))
    count = {count}
    def block(begin, length, peer=rank):
        return torch.arange(begin, begin + length, dtype=torch.float32) % 1021 + 1000 * peer
    def memory():
        return block(0, 2 * count + 10)
    for shift in (0, 1, 7):  # 0 of rank 0, and `count` of rank 1, is where it belongs
        for begin in (shift, count + shift):
            both = torch.cat([block(begin, count, 0), block(begin, count, 1)])
            base = memory()
            dist.all_gather_into_tensor(base[: 2 * count], base[begin : begin + count])
            assert torch.equal(base[: 2 * count], both), (shift, begin)
            base = memory()
            dist.all_gather([base[:count], base[count : 2 * count]], base[begin : begin + count])
            assert torch.equal(base[: 2 * count], both), (shift, begin)
            sums = block(rank * count, count, 0) + block(rank * count, count, 1)
            base = memory()
            dist.reduce_scatter_tensor(base[begin : begin + count], base[: 2 * count])
            assert torch.equal(base[begin : begin + count], sums), (shift, begin)
            base = memory()
            dist.reduce_scatter(base[begin : begin + count], [base[:count], base[count : 2 * count]])
            assert torch.equal(base[begin : begin + count], sums), (shift, begin)
        base = memory()
        dist.all_to_all_single(base[shift : 2 * count + shift], base[: 2 * count])
        part = [block(rank * count, count, peer) for peer in range(2)]
        assert torch.equal(base[shift : 2 * count + shift], torch.cat(part)), shift
    dist.destroy_process_group()
    """
    run(script, timeout=60)


@pytest.mark.parametrize("algorithm", ["engine", "shared_memory"])
def test_complex_numbers_are_added_up_and_lists_to_reduce_may_be_uneven(algorithm):
    script = f"""
    init(timeout=10, pg_options=Options(algorithm="{algorithm}"))
    numbers = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    for op, wanted in ((dist.ReduceOp.SUM, [3 + 6j, 9 - 3j]), (dist.ReduceOp.AVG, [1.5 + 3j, 4.5 - 1.5j])):
        for call in (dist.all_reduce, lambda tensor, op: dist.reduce(tensor, 0, op)):
            found = numbers.clone()
            call(found, op)
            assert found.tolist() == wanted or (rank == 1 and call is not dist.all_reduce), found
        found = torch.zeros_like(numbers)
        dist.reduce_scatter_tensor(found, torch.cat([numbers, numbers]), op)
        assert found.tolist() == wanted, found
    error, _ = told(lambda: dist.reduce(numbers, 0, dist.ReduceOp.MAX))
    assert "complex" in error, error
    dist.group.WORLD.broadcast(numbers, 1).wait()
    assert numbers.tolist() == [2 + 4j, 6 - 2j], numbers
    found = torch.zeros(2 + rank)
    dist.reduce_scatter(found, [torch.full((2,), 1.0 + rank), torch.full((3,), 4.0 + rank)])
    assert found.tolist() == [[3.0, 3.0], [9.0, 9.0, 9.0]][rank], found
    dist.destroy_process_group()
    """
    run(script)
