"""Freed memory that a training process keeps: no page faults in a step, nothing kept when it is short or unwanted."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch import kept_memory
from deepytorch.kept_memory import KeptMemory, available_share

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept where malloc is glibc's")

TRAIN = """
import json, resource, torch
import deepytorch
from deepytorch.kept_memory import MEMORY
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, faults, losses = torch.randn(160_000, 64), [], []
for step in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps({"is_kept": MEMORY.is_kept, "faults": min(faults), "losses": losses}))
"""


def trained(**environment: str) -> dict[str, object]:
    given = {**os.environ, "DEEPYTORCH": "on", **environment}
    run = subprocess.run(
        [sys.executable, "-c", TRAIN], env=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_step_maps_no_memory_anew_and_has_the_same_losses() -> None:
    share = available_share()
    if share is not None and share < 0.4:
        pytest.skip(f"only {share:.0%} of the memory is available")
    kept, off = trained(), trained(DEEPYTORCH="off")
    assert kept["is_kept"] is True
    assert off["is_kept"] is False
    assert kept["losses"] == off["losses"]
    assert int(str(off["faults"])) > 20_000  # 16 activations of 40 MB, and gradients
    assert int(str(kept["faults"])) < 5_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPYTORCH_MEMORY", "release"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
    ],
)
def test_who_has_set_the_allocator_up_keeps_that(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "available_share", lambda: 1.0)
    for each in (*kept_memory._OTHERS_SETTINGS, "GLIBC_TUNABLES", "LD_PRELOAD", "DEEPYTORCH_MEMORY"):
        monkeypatch.delenv(each, raising=False)
    assert kept_memory._reason_against(os.environ) is None
    monkeypatch.setenv(name, value)
    assert name in str(kept_memory._reason_against(os.environ))


def test_none_is_kept_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "available_share", lambda: 0.2)
    assert kept_memory._reason_against({}) == "only 20% of the memory is available"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> KeptMemory:
    """What keeps memory, whose calls of the C library do nothing."""

    class Library:
        def __init__(self) -> None:
            self.calls: list[tuple[int, ...]] = []

        def mallopt(self, *given: int) -> int:
            self.calls.append(given)
            return 1

        def malloc_trim(self, pad: int) -> int:
            self.calls.append((pad,))
            return 1

    library = Library()
    monkeypatch.setattr(kept_memory, "_glibc", lambda: library)
    monkeypatch.setattr(kept_memory, "_reason_against", lambda variables: None)
    monkeypatch.setattr(kept_memory, "listen", lambda *_: None)
    return KeptMemory()


def test_short_memory_is_given_back_for_good(memory: KeptMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.09, 0.9])
    monkeypatch.setattr(kept_memory, "available_share", lambda: next(shares))
    assert memory.keep()
    for step in range(1, 33):
        memory.look()
        assert memory.is_kept is (step < 32)
    assert kept_memory._glibc().calls[-1] == (0,)  # `malloc_trim`
    assert not memory.keep()


def test_memory_that_was_given_back_on_request_may_be_kept_again(memory: KeptMemory) -> None:
    assert memory.keep()
    memory.give_back()
    assert not memory.is_kept
    assert memory.keep()


def test_the_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    600000 kB\n")
    monkeypatch.setattr(kept_memory, "_MEMINFO", info)
    monkeypatch.setattr(kept_memory, "_GROUP", tmp_path)
    assert available_share() == pytest.approx(0.6)
    (tmp_path / "memory.max").write_text("max\n")
    assert available_share() == pytest.approx(0.6)
    (tmp_path / "memory.max").write_text(f"{200_000 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon {150_000 << 10}\nfile 7\n")
    assert available_share() == pytest.approx(0.25)
    info.write_text("nothing of the kind\n")
    assert available_share() is None


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(kept_memory, "_reason_against", lambda variables: None)
    assert not KeptMemory().keep()
