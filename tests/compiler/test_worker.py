"""Graphs that another process compiles: what is sent, what comes back, and what may go wrong meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from deepytorch import background
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.worker import queue, store
from deepytorch.compiler.code.worker.graph_data import CannotSend, GraphData, to_bytes
from deepytorch.compiler.code.worker.job import Argument, Job
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan
from deepytorch.errors import DataError
from tests.processes import is_running

aten = torch.ops.aten


def graph() -> fx.GraphModule:
    """x @ w + 1, with a constant and a tag of checkpointing."""
    made = fx.Graph()
    x, weight = made.placeholder("x"), made.placeholder("weight")
    product = made.call_function(aten.mm.default, (x, weight))
    product.meta["recompute"] = 1
    one = made.get_attr("one")
    made.output((made.call_function(aten.add.Tensor, (product, one), {"alpha": 2}),))
    root = nn.Module()
    root.one = torch.ones(())  # type: ignore[assignment]
    return fx.GraphModule(root, made)


def lowering(**options: Any) -> RegionLowering:
    """Of a region without a data-parallel module."""
    config = CompilerConfig(**options)
    return RegionLowering(config, Plan.initial("region", config))


def job(module: fx.GraphModule | None = None, *arguments: Any, **options: Any) -> Job:
    """For `graph()`, unless a module is given."""
    given = arguments or (torch.randn(3, 4), nn.Parameter(torch.randn(4, 5)))
    return Job.of(module or graph(), given, [(0,)] + [()] * (len(given) - 1), lowering(**options))


# ---------------------------------------------------------------- what is sent


def test_a_graph_comes_out_as_it_was() -> None:
    import pickle

    before = graph()
    after = pickle.loads(to_bytes(GraphData(before))).module()
    assert after.code == before.code
    assert [node.meta.get("recompute") for node in after.graph.nodes] == [None, None, 1, None, None, None]
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    torch.testing.assert_close(after(x, weight), before(x, weight), rtol=0, atol=0)


def _of_the_script(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("what", ["a module", "an operator", "a function of the script"])
def test_what_another_process_does_not_know_is_not_sent(what: str) -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    root = nn.Module()
    if what == "a module":
        root.inner = nn.ReLU()
        made.output((made.call_module("inner", (x,)),))
    elif what == "an operator":
        library = torch.library.Library("of_a_script", "FRAGMENT")
        library.define("twice(Tensor x) -> Tensor")
        made.output((made.call_function(torch.ops.of_a_script.twice.default, (x,)),))
    else:
        _of_the_script.__module__ = "__main__"
        made.output((made.call_function(_of_the_script, (x,)),))
    with pytest.raises(CannotSend):
        to_bytes(GraphData(fx.GraphModule(root, made)))


def tensors() -> dict[str, Callable[[], torch.Tensor]]:
    """Kinds of arguments."""
    return {
        "plain": lambda: torch.randn(3, 4),
        "ids": lambda: torch.arange(6).reshape(2, 3),
        "transposed": lambda: torch.randn(4, 3).t(),
        "part of a larger one": lambda: torch.randn(10, 4)[2:5],
        "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
        "frozen parameter": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False),
        "made with gradients": lambda: torch.randn(3, 4, requires_grad=True) * 2,
        "half": lambda: torch.randn(3, 4).bfloat16(),
    }


@pytest.mark.parametrize("kind", tensors())
def test_an_argument_is_made_up_with_all_that_a_compiler_asks_of_it(kind: str) -> None:
    given = tensors()[kind]()
    made = Argument.of(given).make()
    assert type(made) is type(given)
    assert (made.dtype, made.shape, made.stride(), made.storage_offset()) == (
        given.dtype,
        given.shape,
        given.stride(),
        given.storage_offset(),
    )
    assert made.untyped_storage().nbytes() == given.untyped_storage().nbytes()
    assert (made.requires_grad, made.is_leaf) == (given.requires_grad, given.is_leaf)
    if not given.is_leaf:
        made.add_(1)  # a graph may write to it, as to the given one


def test_arguments_that_another_process_cannot_make_up_are_refused() -> None:
    class Mine(torch.Tensor):
        pass

    base = torch.randn(4, 4)
    with pytest.raises(CannotSend, match="Mine"):
        Argument.of(torch.randn(2).as_subclass(Mine))
    with pytest.raises(CannotSend, match="share memory"):
        job(None, base, base.t())
    job(None, torch.empty(3, 0), torch.empty(0, 5))  # neither has memory
    with pytest.raises(CannotSend, match="meta"):
        Argument.of(torch.empty(2, device="meta"))


@pytest.mark.slow
def test_equal_jobs_have_equal_digests_in_any_process() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from deepytorch.switch import SWITCH; SWITCH.enabled = False\n"
        "import torch; torch.set_num_threads(2)\n"
        "import functools, torch._dynamo.config as config\n"
        "config.ignore_logging_functions.add(functools.lru_cache(print))\n"  # as of transformers
        "held = [object() for _ in range(int(sys.argv[2]))]\n"  # so that things lie elsewhere in memory
        "import test_worker\n"
        "print(test_worker.job(None, torch.randn(int(sys.argv[2]), 4), torch.randn(4, 5)).digest())"
    )
    found = set()
    for seed, rows in (("1", "3"), ("2", "900")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(Path(__file__).parent), rows]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        found.add(done.stdout.split()[-1])
    assert len(found) == 1


def test_whatever_code_depends_on_makes_another_digest() -> None:
    def with_threads() -> str:
        torch.set_num_threads(before + 1)
        try:
            return job().digest()
        finally:
            torch.set_num_threads(before)

    def under_autocast() -> str:
        with torch.autocast("cpu", torch.bfloat16):
            return job().digest()

    def without_gradients() -> str:
        with torch.no_grad():
            return job().digest()

    other = graph()
    next(node for node in other.graph.nodes if node.target is aten.add.Tensor).kwargs = {"alpha": 3}
    constant = graph()
    constant.one = torch.zeros(())
    before = torch.get_num_threads()
    found = [
        job().digest(),
        with_threads(),
        under_autocast(),
        without_gradients(),
        job(other).digest(),
        job(constant).digest(),
        job(None, torch.randn(3, 4).double(), nn.Parameter(torch.randn(4, 5).double())).digest(),
        job(None, torch.randn(3, 4), nn.Parameter(torch.randn(4, 5), requires_grad=False)).digest(),
        job(inductor={"max_autotune": True}).digest(),
        job(loss_rows=False).digest(),
    ]
    assert len(set(found)) == len(found)
    assert job(wait=True).digest() == found[0]  # who compiles makes no difference


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    (tmp_path / "cache").mkdir(mode=0o700)
    place = store.folder()
    assert place is not None
    return place


def entry(place: Path, name: str, num_bytes: int = 100, used: float | None = None) -> None:
    """Keep one of so many bytes."""
    made = place / ".made"
    files = store.files_of(made)
    (files / "ab").mkdir()
    (files / "ab" / f"{name}.so").write_bytes(b"x" * num_bytes)
    store.keep(made, place / name, {"model": "Net", "seconds": 1.0, "torch": "2.13"})
    if used is not None:
        os.utime(place / name / "entry.json", (used, used))


def test_an_entry_is_found_and_installed(kept: Path, tmp_path: Path) -> None:
    entry(kept, "one")
    assert store.find("two") is None
    found = store.find("one")
    assert found is not None
    found.install()
    assert (tmp_path / "torch" / "ab" / "one.so").read_bytes() == b"x" * 100
    assert not [each for each in (tmp_path / "torch" / "ab").iterdir() if each.name.startswith(".")]


def test_the_least_recently_used_leave(kept: Path) -> None:
    for number, name in enumerate(["old", "older", "new"]):
        entry(kept, name, used=1000.0 - 10 * (number == 1) + 10 * (number == 2))
    store.trim(limit_bytes=250)
    assert [each.digest for each in store.entries()] == ["new", "old"]


def test_an_entry_that_others_can_write_is_not_used(kept: Path) -> None:
    entry(kept, "one")
    (kept / "one").chmod(0o777)
    assert store.find("one") is None
    assert store.entries() == []


def test_half_an_entry_is_not_used_and_is_replaced(kept: Path) -> None:
    (kept / "one").mkdir(mode=0o700)
    assert store.find("one") is None
    entry(kept, "one")
    assert store.find("one") is not None


@pytest.mark.parametrize("has_filters", [True, False])
def test_entries_travel_in_one_file(
    has_filters: bool, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filters:  # as on the Python 3.11.2 of Debian 12
        monkeypatch.setattr(store, "_EXTRACTS", {})
    entry(kept, "one")
    entry(kept, "two")
    assert store.export(tmp_path / "all.tar.gz") == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert store.take_in(tmp_path / "all.tar.gz") == 2
    assert store.take_in(tmp_path / "all.tar.gz") == 0
    assert {each.digest for each in store.entries()} == {"one", "two"}
    assert all(each.path.stat().st_mode & 0o077 == 0 for each in store.entries())


def test_a_file_that_is_none_of_ours_is_refused(kept: Path, tmp_path: Path) -> None:
    import io
    import tarfile

    path = tmp_path / "bad.tar.gz"
    path.write_bytes(b"nothing")
    path.chmod(0o600)
    with pytest.raises(DataError, match="is not a file that"):
        store.take_in(path)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO(b""))
    with pytest.raises(DataError, match="outside"):
        store.take_in(path)
    path.chmod(0o666)
    with pytest.raises(DataError, match="others can write"):
        store.take_in(path)
    assert [each.name for each in kept.iterdir()] == []


# ---------------------------------------------------------------- the process


@pytest.fixture
def processes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started in a test, none of which compiles."""
    started: list[subprocess.Popen[bytes]] = []

    def start(_: str) -> subprocess.Popen[bytes]:
        started.append(background.start("sys.stdin.buffer.raw.read(1)"))
        return started[-1]

    monkeypatch.setattr(queue, "start", start)
    monkeypatch.setattr(queue, "_WORKER", None)
    return started


def ends(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is gone soon, as is the thread that talks with it."""
    process.wait(timeout=30)
    queue._WORKER.join(timeout=30)
    return not queue._WORKER.is_alive()


def started_one(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether a thread has started one by now, or will in a moment."""
    deadline = time.monotonic() + 30
    while not processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(processes) == 1


def test_the_process_is_there_before_its_first_job(processes: list[subprocess.Popen[bytes]]) -> None:
    queue.expect("Net")
    queue.expect("Net")  # on another thread, say
    worker = queue._WORKER
    assert started_one(processes)
    assert worker.is_alive()
    token = queue.MODEL.set("Net")
    try:
        pending = queue.compile_in_worker(
            "a graph", graph(), [torch.ones(2, 2), torch.ones(2, 2)], [(), ()], lowering()
        )
    finally:
        queue.MODEL.reset(token)
    assert queue._WORKER is worker
    assert pending.done.wait(timeout=30)  # which ends as soon as it has one
    assert pending.error is not None
    assert len(processes) == 1


def test_it_is_not_there_for_long_where_no_job_comes(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_EXPECTED_WITHIN", 0.1)
    queue.expect("Net")
    assert started_one(processes)
    assert ends(processes[0])


def test_it_does_not_start_for_a_model_of_which_something_is_kept(
    kept: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    entry(kept, "one")
    queue.expect("Net")
    assert queue._WORKER is None
    queue.expect("Other")
    assert started_one(processes)
    queue._WORKER.is_enough()  # of the other one something was kept without its name
    assert ends(processes[0])


def ask(*sizes: tuple[int, int]) -> queue.Compilation:
    """Have `graph()` compiled for arguments of these sizes."""
    return queue.compile_in_worker("a graph", graph(), [torch.ones(size) for size in sizes], [(), ()], lowering())


ANSWERS = """
import os, signal, struct, sys, time
for _ in range(3):
    (length,) = struct.unpack("!Q", sys.stdin.buffer.read(8))
    sys.stdin.buffer.read(length)
"""
DIES = f"{ANSWERS}\ntime.sleep(2); os.kill(os.getpid(), signal.SIGKILL)"
COMPILES = ANSWERS + '\nsys.stdout.write(\'{"seconds": 1.0, "peak_mb": 2.0}\\n\')'


def start_these(monkeypatch: pytest.MonkeyPatch, *codes: str) -> list[str]:
    """Have processes that run these, one after the other, stand in for those that compile; the ones that are left."""
    left = list(codes)

    def start(_: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", left.pop(0)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(queue, "start", start)
    monkeypatch.setattr(queue, "_warm_up", lambda: None)
    monkeypatch.setattr(queue, "_WORKER", None)
    return left


def test_what_another_process_drops_while_it_is_taken_is_compiled(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = start_these(monkeypatch, COMPILES)
    entry(kept, Job.of(graph(), [torch.ones(2, 2), torch.ones(2, 2)], [(), ()], lowering()).digest())
    install = store.Entry.install

    def install_late(found: store.Entry) -> None:
        store.remove(found)
        install(found)

    monkeypatch.setattr(store.Entry, "install", install_late)
    pending = ask((2, 2), (2, 2))
    assert pending.where == "an earlier run"
    assert pending.done.wait(timeout=120)
    assert (pending.error, pending.where, pending.seconds, left) == (None, "a process", 1.0, [])


def test_a_compile_process_that_is_killed_fails_the_graph_that_it_had_alone(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = start_these(monkeypatch, DIES, COMPILES)
    one, other = ask((2, 2), (2, 2)), ask((3, 2), (2, 2))
    assert one.done.wait(timeout=120)
    assert other.done.wait(timeout=120)
    assert one.error == "the process that compiled it ended with -9"
    assert (other.error, other.seconds, left) == (None, 1.0, [])


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux counts")
def test_the_memory_that_is_reported_is_the_process_s_own() -> None:
    ballast = torch.ones(100 << 20)  # 400 MB here
    code = "from deepytorch.process_facts import peak_memory; print(peak_memory() / 2**20)"
    with background.start(code) as process:
        said, _ = process.communicate(timeout=120)
    assert 5 < float(said) < ballast.nbytes / 2**20


def test_it_is_known_whether_a_process_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_STARTED", [])  # of tests before this one
    assert not background.is_working()
    with background.start("sys.stdin.read()") as process:
        assert background.is_working()
        process.communicate(timeout=60)
    assert not background.is_working()


def test_a_process_that_still_imports_ends_with_its_parent() -> None:
    """Importing torch takes up to a minute on a busy machine."""
    code = "from deepytorch import background; print(background.start('import time; time.sleep(600)').pid, flush=True)"
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    deadline = time.monotonic() + 20
    while is_running(int(parent.stdout)):
        assert time.monotonic() < deadline, "the process outlives its parent"
        time.sleep(0.1)


def test_functions_of_torch_that_are_made_inside_of_others_are_sent() -> None:
    import pickle

    pooling = nn.functional.max_pool2d  # made by `boolean_dispatch`
    assert "<locals>" in pooling.__qualname__
    made = fx.Graph()
    x = made.placeholder("x")
    made.output((made.call_function(pooling, (x, 2)),))
    after = pickle.loads(to_bytes(GraphData(fx.GraphModule(nn.Module(), made)))).module()
    image = torch.randn(1, 1, 4, 4)
    [found] = after(image)
    assert torch.equal(found, pooling(image, 2))
