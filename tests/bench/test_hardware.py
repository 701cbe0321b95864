"""The use of a host's hardware is that of the time between `resume` and `pause` alone."""

from __future__ import annotations

import time

import pytest

from deepytorch.bench.hardware import Hardware
from deepytorch.bench.jobs import HARDWARE


def test_only_own_turns_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = iter(range(1000))
    monkeypatch.setattr("deepytorch.bench.hardware._moved", lambda: (10**6 * next(moved), 0))
    with Hardware(every_s=0.1) as hardware:
        time.sleep(0.3)  # the turn of another setup
        for _ in range(2):
            hardware.resume()
            time.sleep(0.25)
            hardware.pause()
            time.sleep(0.3)
    found = hardware.found()
    assert set(found) <= {"seconds", *HARDWARE}
    assert 0.4 < found["seconds"][-1] < 0.9  # of its turns alone
    assert max(found["memory_percent"]) > 0
    assert all(value > 0 for value in found["disk_mb_per_s"])


def test_nothing_is_sampled_unless_it_is_asked_for() -> None:
    with Hardware(on=False) as hardware:
        hardware.resume()
        hardware.pause()
    assert hardware.found() == {}
