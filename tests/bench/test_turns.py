"""Ranks that serve jobs in turns: whose turn it is, and what becomes of a setup one of whose ranks fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deepytorch.bench import channel
from deepytorch.bench.benchmark import Place, Setup
from deepytorch.bench.channel import GO, READY, Channel
from deepytorch.bench.launch import WORKER, RankError, Ranks

RANK = """
import os, runpy, signal, sys, time
turns, is_second = runpy.run_path(sys.argv[1])["Turns"](), os.environ.get("RANK") == "1"
while (given := turns.next_job()) is not None:
    for step in range(given["job"].get("steps", 2)):
        if is_second:
            exec(given["job"].get("before", ""))
        turns.take()
        with open(given["job"]["file"], "a") as file:
            file.write(given["kind"])
        if is_second:
            exec(given["job"].get("within", ""))
        turns.hand_on()
    turns.say("found", {"process": os.getpid()})
"""
COMMAND = (sys.executable, "-c", RANK, channel.__file__)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
FAILS = 'turns.say("failed", {"at_s": time.monotonic(), "error": "ValueError: as it was told"})'
STANDS = "time.sleep(600)"
Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a setup of two ranks."""
    started = []

    def begin(name: str, timeout_s: float = 20.0, command: Sequence[str] = COMMAND) -> Ranks:
        started.append(Ranks(Setup(name=name, job=None), Place(ranks=2), tmp_path, timeout_s, command=command))
        return started[-1]

    yield begin
    for each in started:
        each.end()


def ignore(text: str) -> None:
    """Hear what ranks do, and say nothing."""


def test_steps_alternate_and_ranks_of_a_setup_run_theirs_together(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "steps"
    left = [start("one"), start("other")]
    for ranks, kind, steps in zip(left, "ab", (2, 4), strict=True):
        assert ranks.give(kind, {"steps": steps, "file": file}, ignore)
    while left:
        left = [ranks for ranks in left if ranks.step(ignore)]
    assert file.read_text() == "aabbaabbbbbb"


def test_processes_serve_several_jobs_and_end_by_themselves(start: Start, tmp_path: Path) -> None:
    ranks, found = start("one"), []
    for _ in range(2):
        assert ranks.give("a", {"steps": 1, "file": tmp_path / "steps"}, ignore)
        assert not ranks.step(ignore)
        found.append([each["process"] for each in ranks.found()])
    assert found[0] == found[1]
    assert len(set(found[0])) == 2
    ranks.end(at_once=False)
    assert not [pid for pid in found[0] if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"within": KILLED}, "was ended by SIGKILL, as the system does when it is out of memory"),
        ({"before": "os._exit(3)"}, "ended with exit status 3, it left no error"),
        ({"within": FAILS}, "ValueError: as it was told"),
        ({"within": STANDS}, "stood still for 1 s at: the beginning of a job"),
        ({"before": STANDS}, "stood still for 1 s at: the beginning of a job"),
        ({"before": f"turns.say('doing', 'much'); {STANDS}"}, "stood still for 1 s at: much"),
    ],
    ids=["killed", "ended", "failed", "stuck in its turn", "never ready", "stuck at what it said"],
)
def test_a_rank_that_fails_says_why(start: Start, job: dict[str, str], reason: str, tmp_path: Path) -> None:
    ranks = start("fails", 1.0 if STANDS in "".join(job.values()) else 20.0)

    def measure() -> bool:
        return ranks.give("a", job | {"file": tmp_path / "steps"}, ignore) and ranks.step(ignore)

    with pytest.raises(RankError, match=r"ank(s| 1 of 2) of fails .*All ranks were ended") as raised:
        measure()
    assert raised.value.reason == reason


@pytest.mark.slow
def test_the_words_of_an_error_in_a_worker_are_the_reason(start: Start) -> None:
    with pytest.raises(RankError) as raised:
        start("fails", 120.0, WORKER).give("training", {"size": "huge"}, ignore)
    assert raised.value.reason.startswith("DataError: The TrainingJob lacks ['model']")


@pytest.mark.parametrize("in_step", [False, True], ids=["as it waits for its turn", "in its step"])
def test_a_rank_ends_when_its_benchmark_is_gone(in_step: bool, tmp_path: Path) -> None:
    ours = Channel()
    process = subprocess.Popen(COMMAND, stdin=ours.rank_end.fileno(), env={**os.environ, "RANK": "1"})
    try:
        ours.started()
        ours.send({"kind": "a", "job": {"within": STANDS, "file": str(tmp_path / "steps")}})
        assert Channel.listen([ours], time.monotonic() + 20)
        assert ours.next_message() == {READY: True}
        if in_step:
            ours.send({GO: True})
            assert not Channel.listen([ours], time.monotonic() + 0.5)  # the step is not over by then
        assert process.poll() is None
        ours.close()
        assert process.wait(timeout=20) == 1
    finally:
        process.kill()
        process.wait()
