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
from deepytorch.bench.models import MODELS, SIZES
from deepytorch.bench.options import DTYPE_NAMES
from deepytorch.cli.options import Model, ModelSize
from deepytorch.errors import DataError, ParityError
from tests.bench.test_schema import VALUES
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


def test_no_command_shows_the_commands(monkeypatch, capsys):
    run(monkeypatch)
    shown = capsys.readouterr()
    assert all(command in shown.out + shown.err for command in ("demo", "bench", "doctor"))


def test_models_and_dtypes_of_the_options_are_those_that_exist():
    from deepytorch.bench.training_step import DTYPES

    assert tuple(model.value for model in Model) == MODELS
    assert tuple(size.value for size in ModelSize) == tuple(SIZES)
    assert tuple(DTYPES) == DTYPE_NAMES


def test_an_error_of_ours_is_one_message_and_status_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "rows.json").write_text("{")
    status = run(monkeypatch, "bench", "unpad", "--data", str(tmp_path / "rows.json"), "--json", "-")
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("Error: The data file")
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
    """Replace the measurement by its result; return the options that it was asked with."""
    from deepytorch.bench.schema import UnpadResult

    asked = []
    monkeypatch.setattr(
        "deepytorch.bench.unpad.run_unpad", lambda options, notify: asked.append(options) or UnpadResult(**VALUES)
    )
    return asked


def test_bench_json_on_stdout_is_one_object_and_the_table_is_on_stderr(monkeypatch, capsys, measured):
    arguments = ["--labels", "all", "--batch-size", "2", "--steps", "5", "--rounds", "1", "--model", "gpt2"]
    assert run(monkeypatch, "bench", "unpad", "--json", "-", *arguments) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == VALUES
    assert "2.10x" in shown.err
    (options,) = measured
    assert (options.labels, options.batch_size, options.steps, options.rounds) == ("all", 2, 5, 1)
    assert options.model == "gpt2"


def test_bench_json_into_a_file_leaves_the_table_on_stdout(monkeypatch, capsys, measured, tmp_path):
    assert run(monkeypatch, "bench", "unpad", "--json", str(tmp_path / "result.json")) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == VALUES
    assert "2.10x" in capsys.readouterr().out
    assert measured[0].labels == "response"


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
        ("bench",), ("bench", "unpad"), ("bench", "hosts"), ("bench", "models"), ("bench", "ddp"), ("bench", "sharded"),
        ("bench", "comm"), ("bench", "start"),
        ("bench", "epoch"), ("bench", "loss"), ("bench", "compute"), ("bench", "kernels"), ("bench", "roofline"),
    ]  # fmt: skip
