"""What was measured of kernels is kept for later processes, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepytorch import private_files, tuning
from deepytorch.tuning import fastest

COST = {"first": 2.0, "second": 1.0, "third": 1.95}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a device that is not there, and takes `COST` milliseconds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_device_name", lambda _: "stand-in")
    monkeypatch.setattr(tuning, "cache_directory", lambda: tmp_path / "cache")
    for name in ("_FILES", "_CHOSEN"):
        monkeypatch.setattr(tuning, name, {})

    def milliseconds(launch: Callable[[str], object], setting: str) -> float:
        launch(setting)
        return COST[setting]

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    return tmp_path / "cache" / "tuned" / "stand-in-1.json"


def nothing(_: str) -> None:
    return None


def refuses(refused: str, error: Exception) -> Callable[[str], None]:
    def launch(setting: str) -> None:
        if setting == refused:
            raise error

    return launch


def test_the_first_stays_unless_another_saves_its_margin(kept: Path) -> None:
    assert fastest("kernel/1", "a", ("first", "third"), nothing) == "third"
    assert fastest("kernel/1", "b", ("first", "third"), nothing, 0.1) == "first"
    assert fastest("kernel/1", "b", ("first", "second", "third"), nothing, 0.1) == "second"
    refused = refuses("first", RuntimeError("too much shared memory"))
    assert fastest("kernel/1", "c", ("first", "third"), refused, 0.1) == "third"
    assert len(json.loads(kept.read_text())) == 4


def test_nothing_is_measured_or_kept_while_it_is_switched_off(kept: Path) -> None:
    tuning.measure(False)
    try:
        assert tuning.measures_nothing()
        assert fastest("kernel/1", "a", ("first", "second"), refuses("first", AssertionError("launched"))) == "first"
    finally:
        tuning.measure(True)
    assert not kept.exists()
    assert not tuning.measures_nothing()
    assert fastest("kernel/1", "a", ("first", "second"), nothing) == "second"


def test_choices_can_be_kept_elsewhere(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_FOLDER", [])
    tuning.keep_in(tmp_path / "other")
    assert fastest("kernel/1", "a", ("first", "second"), nothing) == "second"
    assert not kept.exists()
    assert (tmp_path / "other" / kept.name).exists()


def test_what_was_found_without_memory_for_every_launch_is_not_written(kept: Path) -> None:
    settings, launches = ("first", "second"), []
    refused = refuses("second", torch.OutOfMemoryError("of another step's tensors"))

    def launch(setting: str) -> None:
        launches.append(setting)
        refused(setting)

    for _ in range(2):  # looked for once, all the same
        assert fastest("kernel/1", "a", settings, launch) == "first"
    assert launches == ["first", "second"]
    assert not kept.exists()
    tuning._CHOSEN.clear()  # another process
    assert fastest("kernel/1", "a", settings, nothing) == "second"
    assert len(json.loads(kept.read_text())) == 1


def test_processes_that_write_at_once_keep_what_each_has_found(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastest("kernel/1", "before", ("first", "second"), nothing)
    read, together = private_files.read_private_json, threading.Barrier(2)

    def slow_read(path: Path) -> object:
        content = read(path)
        try:
            together.wait(0.2)  # without a lock both have read before either writes
        except threading.BrokenBarrierError:
            together.reset()
        return content

    monkeypatch.setattr(private_files, "read_private_json", slow_read)
    threads = [
        threading.Thread(target=private_files.add_to_private_json, args=(kept, name, 1)) for name in ("one", "other")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {"one", "other"} <= set(json.loads(kept.read_text()))


def test_a_lock_that_nobody_gives_back_is_not_waited_for(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastest("kernel/1", "before", ("first", "second"), nothing)
    monkeypatch.setattr(private_files, "_LOCK_SECONDS", 0.1)
    with private_files.FileLock(kept.with_suffix(".lock")):
        assert fastest("kernel/1", "a", ("first", "second"), nothing) == "second"
    assert len(json.loads(kept.read_text())) == 1
