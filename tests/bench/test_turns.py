"""Scripts in alternation: whose turn it is, and what becomes of ranks whose peers are gone."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench.alternation import Turn, TurnGiver, alternate
from deepytorch.bench.host_scripts import Script, ScriptFailed, results
from deepytorch.bench.hosts_worker import HostJob, HostsOptions


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


class Ranks:
    """The ranks of a script as threads, each with the pipes that its process would inherit."""

    def __init__(self, count: int) -> None:
        self.giver = TurnGiver(count)
        self.turns = [Turn(os.dup(listen), os.dup(speak)) for listen, speak in self.giver.handed_over]
        self.giver.started()
        self._threads: list[threading.Thread] = []

    def start(self, work: object) -> None:
        for rank, turn in enumerate(self.turns):
            thread = threading.Thread(target=work, args=(rank, turn), daemon=True)  # type: ignore[arg-type]
            thread.start()
            self._threads.append(thread)

    def ended(self) -> bool:
        for thread in self._threads:
            thread.join(20)
        return not any(thread.is_alive() for thread in self._threads)


def test_steps_alternate_and_ranks_of_a_script_run_theirs_together():
    done: list[str] = []

    def steps(name: str, count: int):
        def work(rank: int, turn: Turn) -> None:
            for _ in range(count):
                turn.take()
                done.append(name)
                turn.hand_on()
            turn.close()

        return work

    one, other = Ranks(2), Ranks(2)
    one.start(steps("a", 2))
    other.start(steps("b", 4))
    alternate([lambda: one.giver.give(soon()), lambda: other.giver.give(soon())])
    assert one.ended()
    assert other.ended()
    assert "".join(done) == "aabbaabbbbbb"


def test_a_rank_whose_peer_has_ended_is_not_kept_waiting():
    ran = []

    def work(rank: int, turn: Turn) -> None:
        if rank == 0:
            turn.take()
            ran.append(rank)
            turn.hand_on()
        turn.close()

    ranks = Ranks(2)
    ranks.start(work)
    assert not ranks.giver.give(soon())
    assert ranks.ended()
    assert ran == [0]


def test_a_rank_that_ends_in_its_step_ends_the_turns():
    def work(rank: int, turn: Turn) -> None:
        turn.take()
        if rank == 0:
            turn.hand_on()
        turn.close()

    ranks = Ranks(2)
    ranks.start(work)
    assert not ranks.giver.give(soon())
    assert not ranks.giver.give(soon())
    assert ranks.ended()


def test_a_step_that_does_not_end_is_given_up_at_the_deadline():
    ranks = Ranks(1)
    ranks.start(lambda rank, turn: turn.take())
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ranks.giver.give(soon(0.3))
    assert time.monotonic() - started < 10
    assert ranks.ended()


def job(folder: Path, **given: Any) -> HostJob:
    options = HostsOptions(**{"size": "tiny", "batch_size": 2, "max_length": 32, "lowering": "aot_eager"} | given)
    return HostJob(options=options, host="plain", model="llama", save=folder / "save")


@pytest.mark.slow
def test_a_script_that_fails_says_how_and_the_other_is_ended(tmp_path: Path):
    folders = [tmp_path / name for name in ("fails", "trains")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "wrong.json").write_text("[]")
    scripts = [
        Script(job(tmp_path, data=tmp_path / "wrong.json"), folders[0], 1, 120.0, on=False, in_turns=True),
        Script(job(tmp_path, steps=4), folders[1], 1, 120.0, on=False, in_turns=True),
    ]
    with pytest.raises(ScriptFailed, match=r"^failed without the import: .*wrong\.json"):
        results(*scripts)
    assert all(each.process.poll() is not None for script in scripts for each in script.programs)


def test_a_script_without_end_is_ended(tmp_path: Path):
    script = Script(job(tmp_path, steps=100_000), tmp_path, 1, 0.5, on=False)
    with pytest.raises(ScriptFailed, match=r"^no end after 0\.5 s without the import$"):
        results(script)
    assert all(each.process.poll() is not None for each in script.programs)
