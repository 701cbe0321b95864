"""A group does not wait for a compiler: it runs on stock gloo, and groups made behind the compile are ours.

Most tests have a stand-in for the compiler: the C++ is there, and a rank is told so when its script says `finish()`.
"""

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
from tests.comm import ranks

BACKGROUND = {"DEEPYTORCH_COMPILE": "background"}

STAND_IN = """
import logging
from deepytorch.comm.group.groups import native_backend
from deepytorch.comm.group.native import native
built, started, lines = [], [], []
native.build_in_background = lambda: started.append(True)
native.is_built = lambda: bool(built)

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

logging.getLogger("deepytorch").addHandler(Lines(logging.WARNING))

def finish():
    built.append(True)

def is_ours(group=None):
    return native_backend(group or dist.group.WORLD) is not None

def sums(group=None, backend="deepytorch"):
    assert dist.get_backend(group) == backend
    for size_of in (3, 100_000):
        total = torch.full((size_of,), rank + 1.0)
        dist.all_reduce(total, group=group)
        assert total.unique().tolist() == [sum(range(1, size + 1))], total

def on_stock():
    return {each["name"]: each["why"] for each in deepytorch.report().to_json()["groups_on_stock"]}
"""

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import deepytorch
from deepytorch.comm.group.groups import native_backend
from deepytorch.comm.group.native import native
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((4,), rank + 1.0)
dist.all_reduce(total)
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
    assert native_backend(dist.group.WORLD) is None
    later = "ours"
sys.stdout.write(f"{rank} {total.tolist()[0]} {dist.get_backend()} {later}\\n")
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
    full = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg"), "DEEPYTORCH_COMPILE": "background", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(path), str(wait_seconds)], env=full, capture_output=True, text=True, timeout=570, check=False
    )


def test_a_group_stays_on_gloo_for_its_life_and_one_made_behind_the_compile_is_ours() -> None:
    script = """
init()
sums()
finish()
sums()
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    message = torch.zeros(3)
    dist.recv(message, 0)
    assert message.tolist() == [1.0] * 3
dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
assert not is_ours() and started == [True]
error, _ = told(deepytorch.comm.chosen)
assert "`deepytorch build` does it ahead" in error, error
[(name, why)] = on_stock().items()
assert name == dist.group.WORLD.group_name and "not compiled yet on ranks [0, 1]" in why, why
assert "Process group " + name + " runs on stock gloo" in str(deepytorch.report())
later = dist.new_group()
sums(later)
assert is_ours(later) and not is_ours()
deepytorch.comm.chosen(group=later)  # raises for a group that is not ours
assert list(on_stock()) == [name]
dist.destroy_process_group()
init(suffix="again")
sums()
assert is_ours() and on_stock() == {}
dist.destroy_process_group()
say(*lines)
"""
    first, second = ranks.run(STAND_IN + script, 2, timeout=60, env=BACKGROUND)
    [line] = first.strip().splitlines()  # rank 0 says it for all
    assert "is not compiled yet" in line
    assert "run on stock gloo and nccl to their end" in line
    assert "`deepytorch build` compiles it ahead" in line
    assert not second.strip()


def test_groups_asked_for_as_gloo_do_the_same() -> None:
    script = """
import deepytorch.integrations.process_groups
deepytorch.switch.SWITCH.enabled = True
init("gloo")
pair = dist.new_group()
for group in (None, pair):
    sums(group, "gloo")
finish()
later = dist.new_group()
sums(later, "gloo")
assert (is_ours(), is_ours(pair), is_ours(later)) == (False, False, True)
assert len(on_stock()) == 2
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
ddp(torch.full((2, 3), rank + 1.0)).sum().backward()
assert ddp.module.weight.grad.tolist() == [[3.0] * 3], ddp.module.weight.grad
dist.destroy_process_group()
say(*lines)
"""
    outputs = ranks.run(STAND_IN + script, 2, timeout=60, env=BACKGROUND)
    assert [len(output.strip().splitlines()) for output in outputs] == [1, 0]  # for all groups of the process


def test_where_some_ranks_have_it_already_all_are_on_stock() -> None:
    script = """
if rank == 1:
    finish()
init()
sums()
assert not is_ours()
[why] = on_stock().values()
assert "not compiled yet on ranks [0]" in why, why
finish()
later = dist.new_group()
sums(later)
assert is_ours(later)
say("done")
dist.destroy_process_group()
"""
    for output in ranks.run(STAND_IN + script, 2, timeout=60, env=BACKGROUND):
        assert "done" in output


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_where_one_rank_cannot_compile_all_are_on_stock_and_say_so(broken: int) -> None:
    script = f"""
if rank == {broken}:
    native.failed = lambda: "its C++ does not compile here"
init()
sums()
finish()
sums()
assert not is_ours() and started == [True] * (rank != {broken})
[why] = on_stock().values()
say("\\n".join([why, *lines]))
dist.destroy_process_group()
"""
    for rank, output in enumerate(ranks.run(STAND_IN + script, 2, timeout=60, env=BACKGROUND)):
        lines = output.splitlines()
        assert f"ranks [{broken}] lack deepytorch's native code" in lines[0]
        assert f"ranks [{broken}] lack deepytorch's native code: the group runs on stock" in lines[-1]
        assert (len(lines) == 3) == ("does not compile here" in output) == (rank == broken)


def test_ranks_of_different_builds_are_on_stock_and_say_so() -> None:
    script = """
native.load()
native.digest = lambda: f"build {rank}"
finish()
init()
sums()
assert not is_ours()
say(*lines, on_stock())
dist.destroy_process_group()
"""
    for output in ranks.run(STAND_IN + script, 2, timeout=60, env=BACKGROUND):
        assert output.count("ranks have different builds of deepytorch") == 2


@pytest.mark.parametrize(
    ("environment", "options"),
    [({"DEEPYTORCH_COMPILE": "wait"}, ""), (BACKGROUND, "pg_options=Options(one_shot_bytes=1024)")],
)
def test_who_asks_for_it_waits_for_the_compiler(environment: dict[str, str], options: str) -> None:
    script = f"""
init({options})
sums()
assert is_ours() and not started and on_stock() == {{}}
say("ours")
dist.destroy_process_group()
"""
    for output in ranks.run(STAND_IN + script, 2, timeout=60, env=environment):
        assert "ours" in output


@pytest.mark.slow
def test_a_rank_that_does_not_come_or_is_killed_is_named_while_others_have_no_compiled_code() -> None:
    script = """
if rank == 1:
    hear("named")
    os._exit(0)
error, _ = told(lambda: init(timeout=3.0))
assert "ranks [1] did not come to make the group within 3 s" in error, error
tell("named")
os._exit(0)
"""
    with ranks.Ranks(STAND_IN + script, 2, BACKGROUND) as both:
        outcomes = both.wait(60)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    killed = """
init(timeout=10.0)
sums()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(sums)
say("error")
os._exit(0)
"""
    with ranks.Ranks(STAND_IN + killed, 2, BACKGROUND) as both:
        outcomes = both.wait(60)
    assert "error" in outcomes[0].output, outcomes


def test_a_short_run_starts_on_gloo_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run(tmp_path, 0.0) == ["0 3.0 gloo none", "1 3.0 gloo none"]
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
    assert "memory is short" in next((tmp_path / "xdg").rglob("killed")).read_text()
    with pytest.raises(BuildError):
        module.build()
    assert len(started) == 2
    assert "memory is short" in str(module.failed())


def test_sources_that_do_not_compile_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = of_few_lines(tmp_path, monkeypatch, WRONG)
    with pytest.raises(BuildError, match=r"does not compile here: .* expected unqualified-id"):
        module.build()
    assert "expected unqualified-id" in str(module.failed())


@pytest.mark.matrix  # compiles all of the C++
# 62 s alone; the process that compiles has a low priority, beside tests that have not
def test_a_group_of_the_same_run_is_ours_once_the_compiler_has_ended(tmp_path: Path) -> None:
    assert run(tmp_path, 480.0) == ["0 3.0 gloo ours", "1 3.0 gloo ours"]


@pytest.mark.slow
def test_without_a_compiler_the_group_stays_on_gloo_and_the_next_run_says_why(tmp_path: Path) -> None:
    assert run(tmp_path, 15.0, CXX="/bin/false") == ["0 3.0 gloo none", "1 3.0 gloo none"]
    [failure] = (tmp_path / "xdg" / "deepytorch" / "native").rglob("failure")
    before = failure.stat().st_mtime_ns
    again = script(tmp_path, 0.0, CXX="/bin/false")
    assert "runs on stock gloo and nccl: its C++ does not compile here" in again.stderr
    assert failure.stat().st_mtime_ns == before  # and nothing was compiled
