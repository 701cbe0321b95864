"""A group does not wait for a compiler: it starts on gloo, goes over to ours when it can, and later ones are ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepytorch import extension
from deepytorch.errors import BuildError
from deepytorch.extension import Extension

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import deepytorch
from deepytorch.comm.group import change_over
from deepytorch.comm.group.native import native
begun = time.monotonic()
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((4,), rank + 1.0)
dist.all_reduce(total)
seconds = time.monotonic() - begun
later = "none"
deadline = time.monotonic() + float(sys.argv[1])
while not native.is_built() and time.monotonic() < deadline:
    time.sleep(0.2)
dist.barrier()
if native.is_built():
    group = dist.new_group()
    again = torch.full((4,), rank + 1.0)
    dist.all_reduce(again, group=group)
    assert again.tolist() == total.tolist() == [3.0] * 4
    deepytorch.comm.chosen(group)  # raises for a group that is not ours
    later = "ours"
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3000):
        weight.grad = torch.ones(1)
        optimizer.step()
        time.sleep(0.01)
        over = torch.tensor([float(change_over.standings()[0]["state"].startswith("deepytorch's"))])
        dist.all_reduce(over, op=dist.ReduceOp.MIN)
        if over.item():
            deepytorch.comm.chosen()
            later = "both"
            break
took = "quick" if seconds < 20 else f"{seconds:.0f}s"
sys.stdout.write(f"{rank} {took} {total.tolist()[0]} {dist.get_backend()} {later}\\n")
dist.destroy_process_group()
"""


def run(tmp_path: Path, wait_seconds: float, **environment: str) -> list[str]:
    """Two ranks with an empty cache; what they printed."""
    done = script(tmp_path, wait_seconds, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line)


def script(tmp_path: Path, wait_seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's two ranks."""
    (tmp_path / "xdg").mkdir(mode=0o700, exist_ok=True)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    full = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg"), "DEEPYTORCH_COMPILE": "beside", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(path), str(wait_seconds)], env=full, capture_output=True, text=True, timeout=570, check=False
    )


def test_a_short_run_starts_on_gloo_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run(tmp_path, 0.0) == ["0 quick 3.0 gloo none", "1 quick 3.0 gloo none"]
    folder = tmp_path / "xdg" / "deepytorch" / "native"
    deadline = time.monotonic() + 20
    while compilers(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not compilers(folder)
    assert {each.name for each in folder.rglob("*") if each.is_file()} <= {"build.lock", "failure"}


def compilers(folder: Path) -> list[str]:
    """Processes that compile into this folder's cache."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if each.name.isdigit() and str(folder.parents[1]).encode() in (each / "environ").read_bytes():
                found.append(each.name)
        except OSError:
            continue
    return found


def of_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *endings: str) -> tuple[Extension, list[str]]:
    """A module, and the compilers that were started for it, which end with these words."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg").mkdir(mode=0o700)
    (tmp_path / "csrc").mkdir()
    started: list[str] = []

    def compile_it(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(endings[len(started)])
        time.sleep(1.0)  # long enough for another rank to wait for it
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=started[-1])

    monkeypatch.setattr(extension.subprocess, "run", compile_it)
    return Extension("few_lines", tmp_path, what="lines", without="nothing is lost", alone="alone"), started


KILLED = "FAILED: [code=1] together.o\ng++: fatal error: Killed signal terminated program cc1plus\nninja: build stopped"
WRONG = "csrc/few.cpp:1:1: error: expected unqualified-id\nninja: build stopped"


def test_a_compiler_that_is_killed_is_tried_once_more_by_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, started = of_few_lines(tmp_path, monkeypatch, KILLED, KILLED)
    with ThreadPoolExecutor() as ranks:
        both = [ranks.submit(module.build) for _ in range(2)]
    for each in both:
        assert isinstance(each.exception(), BuildError)
        assert "Killed signal terminated" in str(each.exception())
    assert len(started) == 1  # by one for both
    assert module.failed() is None
    assert "memory is short" in str(module.failed(lately=True))
    with pytest.raises(BuildError):
        module.build()
    assert len(started) == 2
    assert "memory is short" in str(module.failed())


def test_sources_that_do_not_compile_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = of_few_lines(tmp_path, monkeypatch, WRONG)
    with pytest.raises(BuildError, match=r"does not compile here: .* expected unqualified-id"):
        module.build()
    assert "expected unqualified-id" in str(module.failed())


@pytest.mark.matrix  # compiles all of the C++; test_group_change_over has what follows
# 62 s alone; the process that compiles has a low priority, beside tests that have not
def test_the_group_goes_over_to_ours_and_later_ones_of_the_same_run_are_ours(tmp_path: Path) -> None:
    assert run(tmp_path, 480.0) == ["0 quick 3.0 gloo both", "1 quick 3.0 gloo both"]


@pytest.mark.slow
def test_without_a_compiler_the_group_stays_on_gloo_and_the_next_run_says_why(tmp_path: Path) -> None:
    assert run(tmp_path, 15.0, CXX="/bin/false") == ["0 quick 3.0 gloo none", "1 quick 3.0 gloo none"]
    [failure] = (tmp_path / "xdg" / "deepytorch" / "native").rglob("failure")
    before = failure.stat().st_mtime_ns
    again = script(tmp_path, 0.0, CXX="/bin/false")
    assert "runs on stock gloo and nccl: its C++ does not compile here" in again.stderr
    assert failure.stat().st_mtime_ns == before  # and nothing was compiled
