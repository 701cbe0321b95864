"""An error reaches every rank, also of other hosts, and the recorder shows what led to it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deepytorch.cli import app
from tests.comm.ranks import Ranks, run

pytestmark = pytest.mark.timeout(240, func_only=True)


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_reaches_all_hosts_while_the_failing_one_stays_alive(per_host):
    script = f"""
    pretend_hosts({per_host})
    init(timeout=60)
    dist.all_reduce(torch.ones(100))
    from deepytorch.comm.group.groups import group_of
    found = group_of()
    if rank == 0:
        found.backend.abort()
        for other in range(1, size):
            hear(f"heard {{other}}")  # alive until then
    else:
        deadline = time.monotonic() + 20
        while not found.backend.poisoned and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found.backend.poisoned
        assert "aborted" in found.backend.poison_message, found.backend.poison_message
        error, _ = told(lambda: dist.all_reduce(torch.ones(100)))
        assert "aborted" in error, error
        tell(f"heard {{rank}}")
    """
    run(script, num_ranks=2 * per_host, warm=False, timeout=90)


def test_an_error_ends_a_call_that_waits_between_hosts_though_no_connection_closes():
    """A host of one rank has no segment to look at, and whose call is stuck in gloo closes nothing."""
    script = """
    pretend_hosts(1)
    init(timeout=60, pg_options=Options(algorithm="streams", num_streams=2))
    from deepytorch.comm.group.groups import group_of
    dist.all_reduce(torch.ones(100))
    if rank == 0:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        hear("called")
        time.sleep(0.3)  # by then it waits in gloo
        group_of().backend.abort()
    elif rank == 1:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        tell("called")
        error, _ = told(work.wait)
        assert "aborted" in error, error
        tell("heard")
    hear("heard")  # rank 2 is alive, and in none of their calls
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
    tell(f"called {rank}")
    if rank == 0:
        hear("called 1")
        time.sleep(1)  # by then gloo has sent what it can
        assert not work.is_completed()
        groups.group_of().backend.abort()
        error, seconds = told(work.wait)
        assert "aborted" in error, error
        del data, work
        gc.collect()
        time.sleep(0.3)
        assert not memory.expired()
        tell("over")
    hear("over")
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
        tell("over")
    hear("over")
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
    signal.pause()
    """
    with Ranks(script) as ranks:
        ranks.until(0, "ready")
        ranks.until(1, "ready")
        shown = CliRunner().invoke(app, ["doctor", "--group", ranks.output(0).split("ready", 1)[1].split()[0]])
    assert shown.exit_code == 0, shown.output
    assert all(words in shown.output for words in ("local rank 1", "77 elements", "barrier")), shown.output
