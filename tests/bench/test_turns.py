"""Ranks that serve jobs in turns: whose turn it is, and what becomes of a setup one of whose ranks fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench import channel, run
from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.channel import DONE, GO, READY, Channel
from deepytorch.bench.launch import WORKER, Ranks
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table

RANK = """
import os, runpy, signal, sys, time
turns, is_second = runpy.run_path(sys.argv[1])["Turns"](), os.environ.get("RANK", "0") == "1"
while (given := turns.next_job()) is not None:
    job = given["job"]
    for step in range(job["steps"]):
        if is_second:
            exec(job["before"])
        turns.take()
        with open(job["scratch"] + "/steps", "a") as file:
            file.write(job["letter"])
        if is_second:
            exec(job["within"])
        turns.hand_on()
    with open(job["scratch"] + "/steps") as file:
        turns.say("found", {"process": os.getpid(), "steps": file.read()})
"""
COMMAND = (sys.executable, "-c", RANK, channel.__file__)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
FAILS = 'turns.say("failed", {"at_s": time.monotonic(), "error": "ValueError: as it was told"})'


@dataclass(frozen=True, kw_only=True)
class Job:
    """Steps that each write a letter. before, within: what the second rank does before its turn, and in it."""

    letter: str = "a"
    steps: int = 2
    before: str = ""
    within: str = ""
    scratch: Path | None = None


@dataclass(frozen=True)
class Options:
    """None: tests give the jobs themselves."""


class Given(Benchmark[Options]):
    """A benchmark of the jobs that a test gives: a cell for each dictionary, and a setup of two ranks for each name."""

    name, options = "given", Options

    def __init__(self, *cells: Mapping[str, Job], keeps_processes: bool = False) -> None:
        self._cells, self._keeps = cells, keeps_processes

    def cells(self, options: Options) -> Sequence[Cell]:
        return [
            Cell(
                key={"number": number},
                setups=[Setup(name=name, job=job) for name, job in jobs.items()],
                place=Place(ranks=2),
                keeps_processes=self._keeps,
            )
            for number, jobs in enumerate(self._cells)
        ]

    def rows(self, options: Options, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        return [
            Row(
                key={**cell.key, "setup": name},
                figures={"process": ranks[0]["process"]},
                texts={"steps": max((rank["steps"] for rank in ranks), key=len)},  # of the one that was last
            )
            for name, ranks in found.items()
        ]

    def tables(self, results: Results) -> list[Table]:
        return []


def measured(
    monkeypatch: pytest.MonkeyPatch, benchmark: Given, timeout_s: float = 20.0, command: Sequence[str] = COMMAND
) -> list[Row]:
    monkeypatch.setattr(run, "Ranks", partial(Ranks, command=command))
    return run.run_benchmark(benchmark, Options(), timeout_s=timeout_s).rows


def test_steps_alternate_and_ranks_of_a_setup_run_theirs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"one": Job(letter="a"), "other": Job(letter="b", steps=4)}
    one, other = measured(monkeypatch, Given(jobs))
    assert one.texts["steps"] == "aabbaa"  # when its own end has come
    assert other.texts["steps"] == "aabbaabbbbbb"


@pytest.mark.parametrize("keeps", [False, True])
def test_processes_serve_the_next_cell_only_where_it_says_so(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    first, second = measured(monkeypatch, Given({"one": Job()}, {"one": Job(letter="b")}, keeps_processes=keeps))
    assert (first.figures["process"] == second.figures["process"]) == keeps
    assert second.texts["steps"] == "bbbb"  # the folder that a cell's setups share is its own


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(within=KILLED), "was ended by SIGKILL, as the system does when memory is short"),
        (Job(before="os._exit(3)"), "ended with exit status 3, it left no error"),
        (Job(within=FAILS), "ValueError: as it was told"),
        (Job(within="time.sleep(600)"), "stood still for 1 s at: the beginning of a job"),
        (Job(before="time.sleep(600)"), "stood still for 1 s at: the beginning of a job"),
        (Job(before="turns.say('doing', 'much'); time.sleep(600)"), "stood still for 1 s at: much"),
    ],
    ids=["killed", "ended", "failed", "stuck in its turn", "never ready", "stuck at what it said"],
)  # fmt: skip
def test_a_setup_of_which_a_rank_fails_says_why_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, job: Job, reason: str
) -> None:
    timeout_s = 1.0 if "sleep" in job.before + job.within else 20.0
    whole, failed = measured(monkeypatch, Given({"fails": job, "goes on": Job(letter="b")}), timeout_s)
    assert (failed.key["setup"], failed.failed) == ("fails", reason)
    assert whole.texts["steps"].replace("a", "") == "bbbb"


@pytest.mark.slow
def test_the_words_of_an_error_in_a_worker_reach_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = measured(monkeypatch, Given({"fails": Job()}), 120.0, WORKER)  # its job is none of `training`
    assert row.failed.startswith("DataError: The TrainingJob lacks ['model']"), row


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """A rank that has been given a job whose first step takes long."""
    ours = Channel()
    process = subprocess.Popen(COMMAND, stdin=ours.rank_end.fileno(), env={**os.environ, "RANK": "1"})
    ours.started()
    job = {"letter": "a", "steps": 1, "before": "", "within": "time.sleep(600)", "scratch": str(tmp_path)}
    ours.send({"kind": "", "job": job})
    assert ours.receive(time.monotonic() + 20) == {READY: True}
    yield ours, process
    process.kill()
    process.wait()
    ours.close()


@pytest.mark.parametrize("in_step", [False, True], ids=["as it waits for its turn", "in its step"])
def test_a_rank_ends_when_its_benchmark_is_gone(
    rank: tuple[Channel, subprocess.Popen[bytes]], in_step: bool, tmp_path: Path
) -> None:
    ours, process = rank
    if in_step:
        ours.send({GO: True})
        deadline = time.monotonic() + 20
        while not (tmp_path / "steps").exists():
            assert time.monotonic() < deadline, "the step has not begun"
            time.sleep(0.02)
    assert process.poll() is None
    ours.close()
    assert process.wait(timeout=20) == 1


def test_a_step_that_is_not_over_by_the_deadline_is_not_waited_for(
    rank: tuple[Channel, subprocess.Popen[bytes]],
) -> None:
    ours, process = rank
    ours.send({GO: True})
    with pytest.raises(TimeoutError):
        ours.receive(time.monotonic() + 0.3)
    process.kill()
    assert ours.receive(time.monotonic() + 20) is None
    assert DONE not in (ours.receive(time.monotonic() + 20) or {})
