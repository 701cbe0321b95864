"""The caller's state, a group's names, its threads, descriptors and memory, and its end."""

from __future__ import annotations

import os

import pytest

from deepytorch.comm.group.native import native
from tests.comm.ranks import run
from tests.warm import run_script

pytestmark = pytest.mark.timeout(240, func_only=True)


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
        hear("hung")  # rank 0 has hung its function on the future
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        end = dist.all_reduce(torch.ones(2_000), async_op=True).get_future().then(look)
    tell("hung")
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
            time.sleep(1)  # what the other rank waits for ends with this one's group
        else:
            told(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.3)))
    dist.destroy_process_group()
    """
    run(script, warm=False)


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


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
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
    over, submitted = threading.Event(), threading.Semaphore(0)
    def submit():
        try:
            while not over.is_set():
                dist.all_reduce(torch.ones(3_000), group=group, async_op=True)
                submitted.release()
        except Exception:
            submitted.release(500)  # the other rank has destroyed its group first
    thread = threading.Thread(target=submit)
    thread.start()
    for _ in range(500):
        assert submitted.acquire(timeout=40)
    dist.destroy_process_group(group)
    over.set()
    thread.join(10)
    assert not thread.is_alive()
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


DROPPED = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from deepytorch.comm.group.native import native
module = native.load()
sys.setswitchinterval(10)  # this thread keeps the interpreter's lock wherever nobody lets go of it
for _ in range(300):
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 0, 1, timedelta(seconds=10))
    gloo._set_sequence_number_for_group()
    one = {"rank": 0, "size": 1, "num_hosts": 1, "host": 0, "ranks": [0], "timeout_ms": 10_000}
    last = module.Backend(cpu=gloo, cuda=None, segment=None, between=[], **one)
    del gloo
    last.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
    del last
print("done")
"""


def test_python_drops_the_last_reference_while_gloo_drops_a_tensor_of_python():
    native.load()  # compiled here, where no deadline runs
    done = run_script(DROPPED, timeout=60)
    assert done.stdout.split() == ["done"], done.stderr
