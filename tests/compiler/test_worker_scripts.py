"""Scripts that go over to code which another process has compiled: what they do meanwhile, and where they run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compiler.worker_scripts import SCRIPT, UNTIL_COMPILED, run, words


@pytest.mark.slow
def test_a_script_goes_over_to_compiled_code_and_a_later_run_finds_it(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    cold = words(run(UNTIL_COMPILED, tmp_path, TMPDIR=str(tmp_path / "temporary")))
    assert (cold["by"], cold["compiles"], cold["fell"]) == ("a-process", "0", "0")
    (header,) = (tmp_path / "temporary").rglob("*.gch")  # torch's: the compile process has left it for this one
    (entry,) = (tmp_path / "xdg").rglob("entry.json")
    assert header.stat().st_mtime < json.loads(entry.read_text())["made"]
    eager = f"for _ in range({cold['steps']}): step()\n" + UNTIL_COMPILED.splitlines()[-1]
    reference = words(run(eager, tmp_path, DEEPYTORCH="off"))
    assert float(cold["sum"]) == pytest.approx(float(reference["sum"]), rel=1e-6)
    shutil.rmtree(tmp_path / "torch")  # as after a restart of the machine
    warm = words(run(UNTIL_COMPILED, tmp_path))
    assert (warm["by"], warm["compiles"], warm["fell"]) == ("an-earlier-run", "0", "0")
    assert int(warm["steps"]) < int(cold["steps"])


def workers(of: int | None = None) -> list[int]:
    """Processes that compile for others; `of`: for this one."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                command = (each / "cmdline").read_text()
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if "worker.process" in command and (of is None or parent == of):
                found.append(int(each.name))
    return found


def is_alive(process: int) -> bool:
    """Whether it runs. One that has ended and that nobody asked for, as in some containers, does not."""
    try:
        return (Path(f"/proc/{process}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "it ends"])
def test_nothing_is_left_behind(tmp_path: Path, how: str) -> None:
    script = SCRIPT + "\n".join([
        "while not LEDGER.report().regions: step()",
        "for _ in range(3): step()",
        "print('begun', flush=True)",
        "time.sleep(0 if sys.argv[1] == 'it ends' else 100)",
    ])  # fmt: skip
    (tmp_path / "xdg").mkdir(mode=0o700)
    place = tmp_path / "xdg" / "deepytorch" / "compiled"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg"), "DEEPYTORCH_COMPILE": "background"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "torch")
    command = [sys.executable, "-c", script, how]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"begun"
        ours = workers(process.pid)
        if how != "it ends":
            deadline = time.monotonic() + 60
            while not (ours and [*place.glob(".compiling*")]) and time.monotonic() < deadline:
                time.sleep(0.1)  # a process is its parent's copy for a moment, and begins later
                ours = workers(process.pid)
            assert ours
            assert [*place.glob(".compiling*")], "the process has not begun"
            process.send_signal(getattr(signal, how))
        process.wait(timeout=30)
    deadline = time.monotonic() + 60  # of the lowest priority, on a machine that others use
    while any(map(is_alive, ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [each for each in ours if is_alive(each)]
    assert [*place.glob(".compiling*")] == []


@pytest.mark.slow
def test_a_compile_process_that_is_killed_leaves_training_in_eager(tmp_path: Path) -> None:
    script = """
        from deepytorch.compiler.code.worker import queue
        import subprocess
        started = []
        original = subprocess.Popen
        def popen(*args, **kwargs):
            started.append(original(*args, **kwargs)); return started[-1]
        queue.subprocess.Popen = popen
        while not started: step(); time.sleep(0.05)
        os.kill(started[0].pid, signal.SIGKILL)
        deadline = time.time() + 60
        while not LEDGER.report().regions[0].fallbacks and time.time() < deadline: step(); time.sleep(0.05)
        for _ in range(5): step()
        region = LEDGER.report().regions[0]
        print("killed", "ended" in region.fallbacks[0], "by", region.compiled_by or "nobody")
    """
    assert words(run(script, tmp_path)) == {"killed": "True", "by": "nobody"}


@pytest.mark.slow
def test_without_a_process_training_goes_on_in_eager(tmp_path: Path) -> None:
    script = """
        sys.executable = "/nowhere/python"
        deadline = time.time() + 60
        while not (LEDGER.report().regions and LEDGER.report().regions[0].fallbacks) and time.time() < deadline: step()
        print("said", "no-process" if "no process could be started" in LEDGER.report().regions[0].fallbacks[0] else "?")
    """
    assert words(run(script, tmp_path)) == {"said": "no-process"}


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_used_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "xdg" / "deepytorch").mkdir(parents=True)
    (tmp_path / "xdg" / "deepytorch" / "compiled").write_text("not a folder")
    (tmp_path / "xdg").chmod(0o700)
    found = words(run(UNTIL_COMPILED, tmp_path))
    assert (found["by"], found["fell"]) == ("a-process", "0")


OTHER_DOINGS = """
import copy
second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).train()
another = torch.optim.SGD(second.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
average = copy.deepcopy(model).eval()
def step(number):
    x = torch.randn(4 + number % 3, 8, generator=data)
    for part in x.chunk(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(part).square().mean() / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    other = second(x).square().mean(); other.backward(); another.step(); another.zero_grad()
    with torch.no_grad():
        for kept, now in zip(average.parameters(), model.parameters()):
            kept.lerp_(now, 0.1)
        model.eval(); seen = model(x).sum().item(); model.train()
    if number % 7 == 3:  # a checkpoint and back
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(state[0]); optimizer.load_state_dict(state[1])
    return loss.item(), other.item(), seen
number, deadline, extra = 0, time.time() + 150, int(os.environ.get("STEPS", "0"))
def goes_on():
    if extra:
        return number < extra
    regions = LEDGER.report().regions
    return time.time() < deadline and sum(bool(r.compiled_by) for r in regions) < 2
while goes_on():
    found = step(number); number += 1
    time.sleep(0 if extra else 0.05)
if not extra:
    for _ in range(10):
        found = step(number); number += 1
    print("by", "-".join(sorted({r.compiled_by.replace(" ", "-") for r in LEDGER.report().regions} - {""})))
print("steps", number)
for name, each in (("one", model), ("two", second), ("three", average)):
    print(name, repr(sum(p.double().sum().item() for p in each.parameters())))
"""


@pytest.mark.slow
def test_what_a_script_does_besides_goes_on_across_the_change_over(tmp_path: Path) -> None:
    """Mixed precision, a scaler, accumulation, a moving average, evaluation, a checkpoint, a second model."""
    found = words(run(OTHER_DOINGS, tmp_path))
    reference = words(run(OTHER_DOINGS, tmp_path, DEEPYTORCH="off", STEPS=found["steps"]))
    assert found["by"] == "a-process"
    for name in ("one", "two", "three"):
        assert float(found[name]) == pytest.approx(float(reference[name]), rel=2e-3), name


@pytest.mark.matrix
def test_one_core_is_enough(tmp_path: Path) -> None:
    found = words(run("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + UNTIL_COMPILED, tmp_path))
    assert (found["by"], found["compiles"], found["fell"]) == ("a-process", "0", "0")


SMALL_DISK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs(os.environ["XDG_CACHE_HOME"], mode=0o700, exist_ok=True)
os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"], exist_ok=True)
assert libc.unshare(0x00020000) == 0  # mounts of its own
assert libc.mount(b"none", b"/", None, 16384 | (1 << 18), None) == 0
for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
    assert libc.mount(b"tmpfs", os.environ[name].encode(), b"tmpfs", 0, b"size=64k,mode=700") == 0
deadline = time.time() + 120
def settled():
    return any(r.compiled_by or r.fallbacks for r in LEDGER.report().regions)
steps = 0
while not settled() and time.time() < deadline:
    step(); steps += 1; time.sleep(0.02)
for _ in range(3):
    step(); steps += 1
assert settled()
print("steps", steps)
print("sum", repr(sum(p.double().sum().item() for p in model.parameters())))
"""


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root may")
def test_a_full_disk_costs_compiled_code_at_most(tmp_path: Path) -> None:
    found = words(run(SMALL_DISK, tmp_path))
    reference = f"for _ in range({found['steps']}): step()\n" + UNTIL_COMPILED.splitlines()[-1]
    expected = words(run(reference, tmp_path, DEEPYTORCH="off"))
    assert float(found["sum"]) == pytest.approx(float(expected["sum"]), rel=1e-5)


SPAWNS = """
import multiprocessing
def train(number, queue):
    while not compiled():
        step(); time.sleep(0.05)
    for _ in range(3): step()
    queue.put((number, LEDGER.report().regions[0].compiled_by))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    while not LEDGER.report().regions:  # this one compiles, too
        step()
    processes = [context.Process(target=train, args=(number, queue)) for number in range(2)]
    for each in processes: each.start()
    said = sorted(queue.get(timeout=400) for _ in processes)
    for each in processes: each.join()
    print("codes", "-".join(str(each.exitcode) for each in processes))
    print("number", "-".join(str(number) for number, _ in said))
    print("all", "compiled" if all(by for _, by in said) else "eager")
"""


@pytest.mark.matrix
def test_processes_that_are_spawned_have_each_their_own(tmp_path: Path) -> None:
    assert words(run(SPAWNS, tmp_path)) == {"codes": "0-0", "number": "0-1", "all": "compiled"}


SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
if os.environ.get("DEEPYTORCH") != "off":
    from deepytorch import first_steps
    first_steps.ASK_SECONDS = 0.0
dist.init_process_group("gloo")
rank = dist.get_rank()
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
torch.manual_seed(1)
model = LlamaForCausalLM(config).train()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data.manual_seed(rank)
def step():
    for part in range(2):  # gradients of two parts are summed up
        model.set_requires_gradient_sync(part == 1)
        lengths = torch.randint(4, 24, (6, 1), generator=data)
        real = torch.arange(int(lengths.max())) < lengths
        ids = torch.randint(1, 64, real.shape, generator=data)
        loss = model(input_ids=ids * real, attention_mask=real.long(), labels=torch.where(real, ids, -100)).loss
        (loss / 2).backward()
    optimizer.step(); optimizer.zero_grad()
number, extra, over = 0, int(os.environ.get("STEPS", "0")), 0
while number < extra if extra else (over < 6 and number < 3000):
    step(); number += 1
    if not extra:
        everywhere = torch.tensor(float(compiled()))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        over += int(everywhere)
        time.sleep(0.1)  # leaves the cores to the compile process
weights = sum(p.full_tensor().double().abs().sum().item() for p in model.parameters())
if rank == 0:
    print("steps", number, "over", over, "weights", repr(weights))
dist.destroy_process_group()
"""


@pytest.mark.matrix
def test_sharded_blocks_change_over_at_the_beginning_of_an_optimizer_step(tmp_path: Path) -> None:
    """Each rank by itself, since collectives are outside of the graphs."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = words(run(SHARDED, tmp_path, ranks))
    expected = words(run(SHARDED, tmp_path, ranks, DEEPYTORCH="off", STEPS=found["steps"]))
    assert found["over"] == "6"
    assert float(found["weights"]) == pytest.approx(float(expected["weights"]), rel=1e-5)
