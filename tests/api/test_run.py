"""`deepytorch run`: what it starts trains with the import, and is disturbed in nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

import deepytorch
from deepytorch.cli import run as command_line
from deepytorch.run_hook import FOLDER
from deepytorch.run_hook.sitecustomize import HOSTS
from tests.command_line import run
from tests.warm import run_script

DEEPYTORCH = (sys.executable, "-c", "from deepytorch.cli import main; main()")
ROOT = Path(__file__).parents[2]
# Of the environment of a test, without what `deepytorch run` adds; our sources are found by the processes, too.
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("DEEPYTORCH")}
PLAIN["PYTHONPATH"] = str(ROOT)


def start(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start `deepytorch run`; `env` comes on top of this process's."""
    return subprocess.Popen(
        [*DEEPYTORCH, "run", *arguments],
        env={**PLAIN, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, status: int = 0
) -> tuple[str, str]:
    """Return stdout and stderr of `deepytorch run`, which has to end with `status`."""
    process = start(*arguments, env=env, cwd=cwd)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == status, errors[-4000:]
    return out, errors


def python(code: str, *arguments: str, run: bool = True, **settings: str) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a Python below `deepytorch run`, or of one without."""
    command = [*DEEPYTORCH, "run"] if run else []
    done = subprocess.run(
        [*command, sys.executable, "-c", code, *arguments],
        env={**PLAIN, **settings},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with packages that say when they are imported: a torch, a transformers that imports it, and ours."""
    begin = "import sys\nprint(__name__, 'after', [each for each in {others} if each in sys.modules])\n"
    for name, more in {
        "torch": "",
        "transformers": "import torch\n",
        "deepytorch": "",
        "tokens": "import importlib.util\nprint(importlib.util.find_spec('torch') is not None)\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            begin.format(others=sorted({"deepytorch", "torch"} - {name})) + more
        )
    return tmp_path


def hooked(folder: Path, *arguments: str, program: str = sys.executable, **settings: str) -> tuple[str, str]:
    """Return stdout and stderr of a Python that has our folder and `folder` in PYTHONPATH, as the command sets it."""
    environment = {**PLAIN, "DEEPYTORCH_RUN": "on", "PYTHONPATH": f"{FOLDER}{os.pathsep}{folder}", **settings}
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=60, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def bare(folder: Path) -> str:
    """Return a Python without any package, in a new virtual environment."""
    venv.create(folder / "other", symlinks=True, with_pip=False)
    return str(folder / "other" / "bin" / "python")


def test_a_process_that_never_imports_torch_has_neither_it_nor_ours() -> None:
    code = (
        "import sys, json, subprocess, typing; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'deepytorch', 'wrapt')])"
    )
    assert python(code) == (0, "[]\n", "")


def test_the_command_s_own_options_go_to_it() -> None:
    given = ["--json", "-", "--", "-m", "--help", "", "a b"]
    status, out, _ = python("import sys; print(sys.argv[1:])", *given)
    assert (status, out) == (0, f"{given}\n")


def test_the_exit_status_is_the_command_s() -> None:
    assert python("raise SystemExit(7)")[0] == 7


def test_a_signal_reaches_the_command() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 5


def test_what_the_user_has_set_stays() -> None:
    code = """import os, sys
print(os.environ.get('DEEPYTORCH_COMPILE'), os.environ['PYTHONPATH'].split(os.pathsep), sys.path[1:4])"""
    kept = [FOLDER, "/nowhere", str(ROOT)]
    for given in (kept[1:], kept, kept[1:] + kept[:1]):  # below another `deepytorch run`, too
        assert python(code, PYTHONPATH=os.pathsep.join(given)) == (0, f"None {kept} {kept}\n", "")


def test_no_path_becomes_the_working_directory() -> None:
    assert command_line.python_path("") == FOLDER
    assert command_line.python_path("a::b") == os.pathsep.join([FOLDER, "a", "", "b"])


def test_a_command_that_cannot_be_run_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("no-script").write_text("")
    Path("no-program").write_text("nonsense")
    Path("no-program").chmod(0o700)

    def said(*arguments: str) -> str:
        assert run(monkeypatch, "run", *arguments) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "no command was given; expected what starts the training" in said()
    assert "missing-command is no command here; expected a program that PATH leads to" in said("missing-command", "x")
    assert "deepytorch run python train.py" in said("train.py")
    assert "chmod +x ./no-script" in said("./no-script")
    assert "./no-program cannot be started: Exec format error" in said("./no-program")
    monkeypatch.setenv("DEEPYTORCH", "nonsense")
    assert "expected one of on, off, verify" in said(sys.executable)
    monkeypatch.delenv("DEEPYTORCH")
    monkeypatch.setattr(command_line, "FOLDER", "/with:colon")
    assert "PYTHONPATH can hold no folder with ':'" in said(sys.executable)


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        "import sys; sys.from_theirs = __name__",
        "raise ValueError('of theirs')",
        "import missing_module_of_theirs",
        "raise ImportError('of theirs', name='sitecustomize')",
        "raise SystemExit(3)",
    ],
)
def test_a_sitecustomize_that_is_there_already_runs_as_ever(theirs: str | None, tmp_path: Path) -> None:
    if theirs is not None:
        (tmp_path / "sitecustomize.py").write_text(theirs)
    code = (
        "import sys\n"
        "print(getattr(sys, 'from_theirs', None), getattr(sys.modules.get('sitecustomize'), '__file__', None))\n"
        "try:\n    import sitecustomize; print(sitecustomize.__file__)\n"
        "except Exception as error:\n    print(type(error), error)\n"
    )
    # not by the command, which is a Python itself and has the same folder in its PYTHONPATH
    before, behind = (
        python(code, run=False, PYTHONPATH=f"{begin}{tmp_path}:{ROOT}", DEEPYTORCH_RUN="on")
        for begin in ("", f"{FOLDER}:")
    )
    assert behind[:2] == before[:2]
    lines = ([line for line in each[2].splitlines() if line[:2] != "  "] for each in (behind, before))
    assert next(lines) == next(lines)  # but for our frame in a traceback
    if theirs is not None and "from_theirs" in theirs:
        assert behind[1].startswith(f"sitecustomize {tmp_path}")


def test_the_hosts_are_those_of_the_integrations() -> None:
    assert {host.partition(".")[0] for host, _, _ in deepytorch._HOSTS.values()} == HOSTS


def test_ours_is_imported_before_torch_and_before_what_imports_torch(fakes: Path) -> None:
    """A host that is half imported could not be attached to."""
    out, _ = hooked(fakes, "-c", "import transformers, torch")
    assert out.splitlines() == [
        "deepytorch after []",
        "transformers after ['deepytorch']",
        "torch after ['deepytorch']",
    ]
    assert hooked(fakes, "-c", "import tokens")[0].splitlines() == ["tokens after []", "deepytorch after []", "True"]
    out, _ = hooked(fakes, "-c", "import sys, deepytorch, torch; print(sys.meta_path)")
    assert out.splitlines()[:2] == ["deepytorch after []", "torch after ['deepytorch']"]
    assert "sitecustomize.Finder" not in out  # it has done its work


def test_without_torch_hosts_import_nothing_of_ours(fakes: Path) -> None:
    code = (
        "import importlib, shutil\n"
        "shutil.move('torch', 'away')\n"
        "try:\n    import transformers\nexcept ImportError as error:\n    print(error)\n"
        "shutil.move('away', 'torch')\n"
        "importlib.invalidate_caches()\n"
        "import torch\n"
    )
    assert hooked(fakes, "-c", code, program=bare(fakes))[0].splitlines() == [
        "transformers after []",
        "No module named 'torch'",
        "deepytorch after []",
        "torch after ['deepytorch']",
    ]


@pytest.mark.parametrize("settings", [{"DEEPYTORCH": "off"}, {"DEEPYTORCH_RUN": "off"}, {"DEEPYTORCH_RUN": ""}])
def test_off_is_off(settings: dict[str, str], fakes: Path) -> None:
    assert hooked(fakes, "-c", "import torch", **settings)[0] == "torch after []\n"


def test_inductor_s_own_processes_are_left_alone(fakes: Path) -> None:
    folder = fakes / "torch" / "_inductor" / "compile_worker"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "__main__.py").write_text("import torch, sys; print('deepytorch' in sys.modules)")
    for arguments in ([str(folder / "__main__.py"), "--workers=2"], ["-m", "torch._inductor.compile_worker"]):
        out, _ = hooked(fakes, "-u", *arguments)
        assert out.splitlines()[-1] == "False", arguments
    (fakes / "script.py").write_text("import torch, sys; print('deepytorch' in sys.modules)")
    for arguments in (["script.py", str(folder), "-m"], ["-m", "script", "-m", "torch._inductor.compile_worker"]):
        assert hooked(fakes, *arguments)[0].splitlines()[-1] == "True", arguments


def test_a_python_without_deepytorch_says_so_once_and_goes_on(fakes: Path) -> None:
    for file in (fakes / "deepytorch").iterdir():
        file.unlink()
    (fakes / "deepytorch").rmdir()
    program = bare(fakes)
    code = "import torch, transformers, importlib; importlib.reload(torch)"
    out, errors = hooked(fakes, "-c", code, program=program)
    assert out.splitlines() == ["torch after []", "transformers after ['torch']", "torch after []"]
    assert errors.splitlines() == [
        f"deepytorch run: deepytorch is not installed there, so that {program} trains without it. "
        "Install it in that environment, or run a command of one that has it."
    ]
    assert hooked(fakes, "-c", code, program=program, LOCAL_RANK="1")[1] == ""  # rank 0 says it
    (fakes / "deepytorch.py").write_text("import missing_dependency")
    assert (
        "cannot be imported there (No module named 'missing_dependency')"
        in hooked(fakes, "-c", code, program=program)[1]
    )


TRAIN = """
import json, os, subprocess, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ours = sys.modules.get("deepytorch")
if ours is not None:  # the rest of this file knows nothing of it; the test has no time for compilers of C++
    ours.configure(options={"lowering": "eager"}, process_groups=False)
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for step in range(5):
    torch.manual_seed(10 * step + rank)
    mask = (torch.arange(16) < torch.tensor([16, 5, 9, 3])[:, None]).long()
    ids = torch.randint(3, 64, (4, 16)) * mask
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
packed = None if ours is None else ours.report().to_json()["steps_packed"]
print(json.dumps({"losses": losses, "packed": packed}), flush=True)
if sys.argv[1:]:
    subprocess.run([sys.executable, "-m", *sys.argv[1:]], check=True)
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
"""


ARMED = """
import importlib.metadata
# As a command's script may: Dynamo asks for its backend through the same machinery, and then nothing is armed.
importlib.metadata.EntryPoint("start", "torch.optim", "console_scripts").load()
from deepytorch.patches import ledger
print([each.where for each in ledger() if each.applied and "Optimizer" in each.where])
"""


def test_a_script_and_the_process_that_it_starts_train_without_a_line_in_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "armed.py").write_text(ARMED)
    plain = json.loads(run_script(TRAIN, timeout=240).stdout)
    assert len(set(plain["losses"])) == 5
    out, _ = ended(sys.executable, "train.py", "armed", env={"DEEPYTORCH_COMPILE": "wait"}, cwd=tmp_path)
    trained, of_its_child = out.splitlines()
    assert json.loads(trained)["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert json.loads(trained)["packed"] >= 3
    assert of_its_child == "['torch.optim.optimizer.Optimizer.__init__']"


@pytest.mark.slow
def test_ranks_of_torchrun_train_packed_without_a_line_in_their_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    threads = {"OMP_NUM_THREADS": "1", "DEEPYTORCH_COMPILE": "wait"}
    plain, _ = ended(*launch, env={**threads, "DEEPYTORCH": "off"}, cwd=tmp_path)
    found, _ = ended(*launch, env=threads, cwd=tmp_path)
    without, packed = (sorted((json.loads(line) for line in out.splitlines()), key=str) for out in (plain, found))
    assert [each["packed"] for each in without] == [None, None]
    assert all(each["packed"] >= 3 for each in packed)
    for one, other in zip(without, packed, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
