"""A rank that dies, stops, comes late or calls something else: an error on every rank, within a deadline, no hang."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(120, func_only=True)  # a hang is the failure that these tests look for

SURVIVOR = """
init(timeout={timeout})
data = torch.ones({count})
for step in range(1_000_000):
    if step == 3:
        say("running")
    if rank == 1:
        time.sleep({pause})
    try:
        {call}
    except Exception as error:
        say("found", error)
        break
try:
    {call}
except Exception as error:
    say("again", error)
dist.destroy_process_group()
say("destroyed")
"""


def survivor(call: str, count: int = 100_000, timeout: float = 60.0, pause: float = 0.0) -> str:
    return SURVIVOR.format(call=call, count=count, timeout=timeout, pause=pause)


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(data)",
        "dist.all_reduce(data, async_op=True).wait()",
        "dist.broadcast(data, 0)",
        "dist.all_gather_into_tensor(torch.empty(size * data.numel()), data)",
        "dist.barrier()",
    ],
)
def test_a_killed_rank_is_seen_long_before_the_timeout(call):
    with Ranks(survivor(call, pause=0.01)) as ranks:
        ranks.until(0, "running")
        ranks.processes[1].kill()
        ranks.processes[0].wait(20)
        output = ranks.output(0)
    assert all(word in output for word in ("found", "again", "destroyed")), output
    assert "died" in output or "onnection closed" in output or "reset" in output, output


def test_a_killed_rank_is_named_with_the_collective():
    with Ranks(survivor("dist.all_reduce(data)", pause=0.02), num_ranks=3) as ranks:
        ranks.until(0, "running")
        ranks.processes[1].kill()
        outputs = [ranks.wait(20)[rank].output for rank in (0, 2)]
    for output in outputs:
        assert re.search(r"local rank 1 has died: local rank \d waited for it in all_reduce.*collective \d+", output), (
            output
        )
        assert re.search(r"again .*of no use after an earlier error: local rank 1 has died", output), output


def test_a_stopped_rank_times_out_and_finds_the_error_when_it_goes_on():
    with Ranks(survivor("dist.all_reduce(data)", timeout=2.0, pause=0.01)) as ranks:
        ranks.until(0, "running")
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        ranks.processes[0].wait(20)
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        outcomes = ranks.wait(20)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    found = re.search(r"timed out after ([\d.]+) s in all_reduce.* local rank 1 has not come", outcomes[0].output)
    assert found, outcomes[0].output
    assert 2 <= float(found[1]) < 10
    assert "local rank 1 has not come" in outcomes[1].output


def test_wait_takes_a_timeout_and_goes_on_after_it():
    script = """
    init(timeout=30)
    data = torch.ones(1000)
    if rank == 1:
        hear("waited")
    work = dist.all_reduce(data, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        error, seconds = told(lambda: work.wait(timedelta(seconds=0.3)))
        assert seconds > 0.2, seconds
        tell("waited")
    work.wait()
    assert work.is_completed() and data[0] == 2
    dist.destroy_process_group()
    """
    run(script, warm=False)


def test_a_crash_in_the_middle_of_the_rendezvous_leaves_nothing():
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    script = """
    from deepytorch.comm.group import rendezvous
    whole = rendezvous._report
    def crash(outcomes):
        os.kill(os.getpid(), signal.SIGKILL)
    rendezvous._report = crash
    init(timeout=5)
    """
    with Ranks(script) as ranks:
        outcomes = ranks.wait(40)
    assert [outcome.code for outcome in outcomes] == [-signal.SIGKILL, -signal.SIGKILL]
    assert (set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()) <= before


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_within_the_timeout():
    script = """
    store = dist.FileStore(os.environ["RENDEZVOUS"], 3)
    store.set_timeout(timedelta(seconds=40))
    if rank == 2:
        store.get("over")  # alive, and does something else
        raise SystemExit(0)
    try:
        dist.init_process_group(
            "deepytorch", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=3)
        )
    except dist.DistStoreError as error:
        say(error)
    store.set(f"saw {rank}", "")
    if rank == 0:
        store.wait(["saw 1"], timedelta(seconds=20))
        store.set("over", "")
    """
    outputs = run(script, num_ranks=3, timeout=60, warm=False)
    for output in outputs[:2]:
        assert "ranks [2] did not come to make the group within 3 s" in output, outputs


def test_without_shared_memory_the_group_works_on_gloo():
    script = """
    import resource
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # no room for the segment's file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    init()
    data = torch.full((100_000,), float(rank))
    dist.all_reduce(data)
    assert data[0] == 1
    from deepytorch.comm import chosen
    assert chosen(num_bytes=1 << 20).algorithm == "engine"
    average = torch.full((100,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average[0] == 0.5
    dist.destroy_process_group()
    say("done")
    """
    outputs = run(script)
    assert any("go without shared memory" in output for output in outputs), outputs


@pytest.mark.slow
def test_two_jobs_on_one_host_at_a_time():
    script = """
    init()
    for step in range(50):
        data = torch.full((30_000,), float(rank + step))
        dist.all_reduce(data)
        assert data[0] == 2 * step + 1
    dist.destroy_process_group()
    """
    with Ranks(script) as one, Ranks(script) as other:
        outcomes = one.wait(60) + other.wait(60)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0], outcomes


@pytest.mark.slow
def test_more_ranks_than_cores():
    script = """
    init(timeout=60)
    for count in (1, 5_000, 700_001):
        data = torch.full((count,), float(rank + 1))
        dist.all_reduce(data)
        assert torch.all(data == size * (size + 1) / 2)
    dist.destroy_process_group()
    """
    run(script, num_ranks=8, timeout=120, warm=False)


def test_a_forked_child_is_told_and_does_not_disturb_its_parent():
    script = """
    import warnings
    warnings.simplefilter("ignore")
    init()
    data = torch.ones(1000)
    dist.all_reduce(data, async_op=True).wait()
    child = os.fork()
    if child == 0:
        error, _ = told(lambda: dist.all_reduce(data))
        dist.destroy_process_group()  # its copy
        os._exit(7 if "forked" in error else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(data)
    assert data[0] == 4
    dist.destroy_process_group()
    """
    run(script, warm=False)


def test_a_living_child_does_not_hide_the_death_of_its_parent():
    script = """
    init(timeout=30)
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        if os.fork() == 0:
            hear("seen")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    error, _ = told(lambda: dist.all_reduce(torch.ones(10)))
    assert "died" in error, error
    tell("seen")
    dist.destroy_process_group()
    """
    with Ranks(script) as ranks:
        assert ranks.processes[0].wait(30) == 0, ranks.output(0)


def test_nothing_is_left_after_a_job():
    script = """
    init()
    dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    dist.destroy_process_group()
    maps = open("/proc/self/maps").read()
    assert "memfd:deepytorch" not in maps, [line for line in maps.splitlines() if "memfd" in line]
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [os.readlink(path) for path in paths if os.path.exists(path)]
    assert not [name for name in files if "deepytorch" in name], files
    """
    run(script, warm=False)


def test_it_opens_no_listener_of_its_own():
    script = """
    def listeners():
        rows = []
        for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            rows += [line.split() for line in open(name).read().splitlines()[1:]]
        inodes = {row[9] for row in rows if row[3] == "0A"}
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                name = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if name.startswith("socket:["):
                mine.add(name[8:-1])
        return len(inodes & mine)
    init("gloo")
    stock = listeners()
    dist.barrier()  # gloo of the other rank may still be connecting: it would not come to the second group
    dist.destroy_process_group()
    init("deepytorch", suffix="2")
    dist.all_reduce(torch.ones(100_000))
    say("listeners", stock, listeners())
    assert listeners() <= stock, (stock, listeners())
    dist.destroy_process_group()
    """
    run(script, warm=False)
