"""Going on after a rank is gone: torchrun's restarts, and survivors that form their group anew."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.ranks import Ranks

pytestmark = pytest.mark.timeout(240, func_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_survivors_form_their_group_anew(victim):
    script = f"""
    deepytorch.switch.SWITCH.enabled = True
    init("gloo", timeout=90)
    data = torch.ones(1000)
    dist.all_reduce(data)
    if rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    error, _ = told(lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(3)])
    assert "died" in error, error
    members = deepytorch.comm.shrink()
    assert members == tuple(peer for peer in range(3) if peer != {victim}), members
    assert dist.get_world_size() == 2 and members[dist.get_rank()] == rank and dist.get_backend() == "gloo"
    data = torch.full((1000,), float(rank))
    dist.all_reduce(data)
    assert data[0] == sum(members)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    say("went on")
    """
    with Ranks("import deepytorch.comm\n" + script.replace("\n    ", "\n"), 3) as ranks:
        outcomes = ranks.wait(60)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.code == 0, outcome.output[-3000:]
            assert "went on" in outcome.output


@pytest.mark.slow
def test_a_rank_that_stands_still_is_left_out_and_told_so():
    script = """
    init(timeout=2)
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        hear("went on without it")
    error, _ = told(lambda: dist.all_reduce(torch.ones(10)))
    if rank == 1:
        error, _ = told(lambda: deepytorch.comm.shrink(timedelta(seconds=1)))
        assert "have gone on without rank 1" in error, error
    else:
        assert deepytorch.comm.shrink(timedelta(seconds=1)) == (0, 2)
        data = torch.ones(5)
        dist.all_reduce(data)
        assert data[0] == 2
        tell("went on without it")
        hear("was told so")
    tell("was told so")
    os._exit(0)
    """
    with Ranks("import deepytorch.comm\n" + script.replace("\n    ", "\n"), 3) as ranks:
        outcomes = ranks.wait(60)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.output[-2000:] for outcome in outcomes]


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, signal
import deepytorch
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(4):
    data = torch.full((1000,), 1.0 + dist.get_rank())
    dist.all_reduce(data)
    assert data[0] == 3
    if attempt == 0 and dist.get_rank() == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
os.write(1, b"finished in attempt %d\\n" % attempt)
dist.destroy_process_group()
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("finished in attempt 1") == 2, done.stdout


@pytest.mark.slow
def test_a_rank_that_has_ended_takes_nothing_with_it_that_others_still_read():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = f"""
    deepytorch.configure(options={{"lowering": "aot_eager"}})
    deepytorch.switch.SWITCH.enabled = True
    store = dist.TCPStore("127.0.0.1", {port}, size, rank == 0)  # lives in rank 0
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if rank == 1 and step == 2:  # slow to read what rank 0 has said
            whole = dist.PrefixStore.wait
            dist.PrefixStore.wait = lambda *given: (time.sleep(1), whole(*given))
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    say("trained", deepytorch.report().to_json()["gradients"][0]["syncs"])
    os._exit(0)
    """
    with Ranks(script.replace("\n    ", "\n"), warm=False) as ranks:
        outcomes = ranks.wait(60)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.output[-2000:]
        assert "trained 3" in outcome.output
