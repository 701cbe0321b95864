"""The command line as a user meets it: options, exit status, messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import deepytorch
from deepytorch import cli
from deepytorch.bench import run as run_module
from deepytorch.bench.models import SIZES
from deepytorch.bench.options import DTYPE_NAMES
from deepytorch.bench.results import Results, read_result
from deepytorch.bench.unpad import OURS
from deepytorch.bench.zoo import TEXT_SIZES
from deepytorch.cli.output import Output
from deepytorch.errors import DataError, ParityError
from tests.bench.test_unpad import RUN
from tests.command_line import run

ROOT = Path(__file__).parents[2]


def commands(group, path=()):
    """Every command below `group`, with its words."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))
# Options that mean something where they are left out, and have no default that typer shows.
WITH_A_MEANING = ("data", "ranks", "rate", "flow_rate", "logs", "links", "compress", "lowering")


def test_version_and_help_answer_without_loading_torch():
    asked = [["--version"], ["--help"], *([*words, "--help"] for words in COMMANDS)]
    code = (
        "import sys\nfrom deepytorch import cli\n"
        f"for arguments in {asked}:\n"
        "    sys.argv = ['deepytorch', *arguments]\n"
        "    try:\n        cli.main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"deepytorch {deepytorch.__version__}\n" in done.stdout


def test_progress_goes_to_a_file_as_lines_at_times(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("deepytorch.cli.output.time.monotonic", lambda: clock[0])
    with Output(None).progress() as notify:
        for second, text in [
            (1, "first"),
            (61, "second"),
            (62, "third"),
            (130, "third"),
            (191, "third"),
            (192, "last"),
        ]:
            clock[0] = second
            notify(text)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.sub(r"\d\d:\d\d:\d\d ", "", shown.err).split() == ["second", "third", "last"]


def test_no_command_shows_the_commands(monkeypatch, capsys):
    run(monkeypatch)
    shown = capsys.readouterr()
    assert all(command in shown.out + shown.err for command in ("demo", "bench", "doctor"))


def test_dtypes_of_the_options_are_those_that_exist():
    from deepytorch.bench.training_step import DTYPES

    assert tuple(SIZES) == TEXT_SIZES
    assert tuple(DTYPES) == DTYPE_NAMES


def test_an_error_of_ours_is_one_message_and_status_2(monkeypatch, capsys):
    status = run(monkeypatch, "bench", "unpad", "--models", "lama")
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith('Error: models has "lama", expected one of llama, qwen2')
    assert "Traceback" not in shown.err


def test_text_that_looks_like_markup_survives_in_a_message(monkeypatch, capsys):
    def fail(*_):
        raise DataError("found [bold]text[/] in items[0]")

    monkeypatch.setattr("deepytorch.doctor.collect", fail)
    assert run(monkeypatch, "doctor") == 2
    assert "Error: found [bold]text[/] in items[0]\n" in capsys.readouterr().err


def test_an_unknown_option_value_is_refused_before_anything_runs(monkeypatch, capsys):
    assert run(monkeypatch, "demo", "--model", "lama") == 2
    assert "lama" in capsys.readouterr().err


def test_demo_passes_its_options_on_and_fails_when_the_demo_does(monkeypatch, capsys, tmp_path):
    asked = []

    def fake(options, console):
        asked.append(options)
        raise ParityError("The demo did not pass: deepytorch failed.")

    monkeypatch.setattr("deepytorch.demo.run_demo", fake)
    arguments = ["--model", "t5", "--steps", "9", "--batch-size", "3", "--dtype", "bf16", "--out", str(tmp_path)]
    assert run(monkeypatch, "demo", *arguments, "--data", "rows.json", "--device", "cuda") == 2
    (options,) = asked
    assert (options.model, options.steps, options.batch_size, options.dtype) == ("t5", 9, 3, "bf16")
    assert (options.out, options.data, options.device) == (tmp_path, Path("rows.json"), "cuda")
    assert "Error: The demo did not pass: deepytorch failed." in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    """Replace the processes of a benchmark by their findings; return the jobs that they were given."""
    given = []

    def measure(_, cell, notify):
        given.append(cell.setups[0].job)
        return {OURS: [RUN]}, {}

    monkeypatch.setattr("deepytorch.bench.run._Processes.measure", measure)
    return given


def test_bench_writes_the_result_file_and_shows_its_table(monkeypatch, capsys, measured, tmp_path):
    path = tmp_path / "result.json"
    arguments = ["--labels", "all", "--batch-size", "2", "--steps", "5", "--rounds", "1", "--models", "gpt2,llama"]
    assert run(monkeypatch, "bench", "unpad", "--out", str(path), *arguments) == 0
    shown = capsys.readouterr().out
    assert "3.00x" in shown
    assert "gpt2, small, batch 2, labels all" in shown
    options = measured[0].options
    assert (options.labels, options.batch_size, options.steps, options.rounds) == ("all", 2, 5, 1)
    assert [job.model for job in measured] == ["gpt2", "llama"]
    found = read_result(Results, path)
    assert {row.key["setup"] for row in found.having(model="llama")} == set(RUN["seconds"])


def test_bench_that_is_stopped_keeps_what_is_done_and_goes_on(monkeypatch, capsys, measured, tmp_path):
    path, arguments = tmp_path / "result.json", ("--models", "gpt2,llama", "--steps", "5")
    measure = run_module._Processes.measure

    def stops(_, cell, notify):
        if cell.key["model"] == "llama":
            raise KeyboardInterrupt
        return measure(_, cell, notify)

    with monkeypatch.context() as patch:
        patch.setattr(run_module._Processes, "measure", stops)
        assert run(patch, "bench", "unpad", "--out", str(path), *arguments) == 130
    shown = capsys.readouterr().out
    assert "Stopped: the same command goes on from here." in shown
    assert "3.00x" in shown
    assert {row.key["model"] for row in read_result(Results, path).rows} == {"gpt2"}
    assert run(monkeypatch, "bench", "unpad", "--out", str(path), *arguments) == 0
    assert [job.model for job in measured] == ["gpt2", "llama"]
    assert run(monkeypatch, "bench", "unpad", "--out", str(path), "--steps", "6") == 2
    assert "give another --out" in capsys.readouterr().err


def test_doctor_prints_a_table_or_json(monkeypatch, capsys):
    monkeypatch.setattr("deepytorch.doctor.collect", lambda: {"deepytorch": "1.2"})
    monkeypatch.setattr("deepytorch.doctor.render", lambda found: f"found {found['deepytorch']}")
    assert run(monkeypatch, "doctor") == 0
    assert capsys.readouterr().out == "found 1.2\n"
    assert run(monkeypatch, "doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"deepytorch": "1.2"}


def test_doctor_shows_the_environment_that_the_user_has(monkeypatch, capsys):
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "wait")  # given back at the end
    monkeypatch.delenv("DEEPYTORCH_COMPILE")
    monkeypatch.setattr("deepytorch.doctor.collect", lambda: dict(os.environ))
    assert run(monkeypatch, "doctor", "--json") == 0
    assert "DEEPYTORCH_COMPILE" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_says_what_each_option_does_without_words_of_ours(words):
    texts = {" ".join(words): COMMANDS[words].help}
    texts |= {option.name: getattr(option, "help", None) for option in COMMANDS[words].params}
    assert all(texts.values()), texts
    ours = re.compile(r"\b(arms?|epilogues?|replays?|picks?|entry|entries|armed|declined?|lowering|cells?)\b")
    assert not [text for text in texts.values() if ours.search(text)]
    for option in COMMANDS[words].params:  # what is left out is said, by typer or in words
        if getattr(option, "default", None) is None and not option.required and option.name in WITH_A_MEANING:
            assert "Default: " in option.help, option.name


def test_commands_are_spelled_in_the_help_as_they_are_typed():
    assert list(COMMANDS) == [
        ("demo",), ("run",), ("verify",), ("profile",), ("doctor",), ("gpu-check",), ("config",), ("build",), ("lab",),
        ("simulate",),
        ("cache",), ("cache", "list"), ("cache", "export"), ("cache", "import"), ("cache", "clear"),
        ("bench",), ("bench", "unpad"), ("bench", "hosts"), ("bench", "ddp"), ("bench", "sharded"), ("bench", "comm"),
        ("bench", "start"), ("bench", "epoch"), ("bench", "loss"), ("bench", "compute"), ("bench", "acspeed"),
        ("bench", "scaling"), ("bench", "memory"), ("bench", "deepytorch"), ("bench", "peers"),
        ("bench", "models"), ("bench", "kernels"), ("bench", "roofline"), ("bench", "report"),
    ]  # fmt: skip
