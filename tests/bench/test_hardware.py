"""The use of a host's hardware is that of the time between `resume` and `pause` alone."""

from __future__ import annotations

import time

import pytest

from deepytorch.bench.hardware import Hardware, machine
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


def test_a_machine_is_told_by_its_processors_memory_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.bench.hardware._gpus", lambda: [0, 1, 2])
    monkeypatch.setattr("deepytorch.bench.hardware._name", lambda gpu: "NVIDIA H200" if gpu < 2 else "NVIDIA L4")
    monkeypatch.setattr("deepytorch.bench.hardware.cpu_model", lambda: "Xeon")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 23}[name])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert machine() == "x86_64, 16 CPUs (Xeon), 32 GiB, 2 x NVIDIA H200, 1 x NVIDIA L4"
