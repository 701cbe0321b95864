"""The demo shows every setup, and does not pass when one fails or leaves eager's path."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from rich.console import Console

import deepytorch
from deepytorch import demo
from deepytorch.compiler.report import LEDGER
from deepytorch.demo import DemoOptions, DemoResult, Run, Way, run_demo
from deepytorch.errors import ConfigError, ParityError

EAGER, COMPILED = Way("eager", None), Way("compiled", "aot_eager")
UNCOMPILED = Way("compiled", None)  # another setup, where it does not matter what it runs


class Report:
    def __str__(self) -> str:
        return "what the backend counted"


@pytest.fixture
def console(monkeypatch):
    monkeypatch.setitem(vars(deepytorch), "report", lambda reset=False: Report())
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def options(rows_file, tmp_path):
    return partial(_options, out=tmp_path / "out", data=rows_file)


def _options(**changes) -> DemoOptions:
    smallest = {"size": "tiny", "steps": 4, "batch_size": 4, "max_length": 256, "vocab_size": 400}
    return DemoOptions(**smallest | {"ways": (EAGER, COMPILED)} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_all_arms_train_on_the_same_path_and_are_shown(options, tmp_path, console, model):
    result = run_demo(options(model=model), console)
    assert [run.name for run in result.runs] == ["eager", "compiled"]
    assert all(len(run.losses) == len(run.seconds) == 4 for run in result.runs)
    assert result.loss_difference(result.runs[1]) < 1e-5
    assert result.runs[1].compiled_steps
    assert not result.runs[0].compiled_steps
    shown = console.file.getvalue()
    assert "compiled" in shown
    assert f"{result.runs[1].losses[-1]:.4f}" in shown
    assert "what the backend counted" in shown
    assert (tmp_path / "out" / f"{model}.png").read_bytes().startswith(b"\x89PNG")


def test_training_lowers_the_loss(options, tmp_path, console):
    rows = tmp_path / "rows.json"
    rows.write_text('[{"instruction": "Say it.", "output": "one two three"}, {"instruction": "Say.", "output": "one"}]')
    result = run_demo(options(data=rows, batch_size=2, steps=12, learning_rate=5e-3, ways=(EAGER,)), console)
    assert result.runs[0].losses[-1] < 0.8 * result.runs[0].losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_lower_precision_stays_within_its_tolerance(options, console, dtype):
    result = run_demo(options(dtype=dtype), console)  # raises when it does not
    fp32 = run_demo(options(ways=(EAGER,)), console)
    assert result.runs[0].losses != fp32.runs[0].losses


def test_a_failing_arm_is_named_and_the_others_are_still_shown(options, console):
    with pytest.raises(ParityError, match=r"broken failed: .*no_such_backend"):
        run_demo(options(ways=(EAGER, Way("broken", "no_such_backend"), UNCOMPILED)), console)
    shown = console.file.getvalue()
    assert "failed" in shown
    assert "compiled" in shown


def test_an_arm_that_leaves_eager_s_path_fails_the_demo(options, console, monkeypatch):
    build = demo.build_model

    def build_another(*arguments, **settings):
        model = build(*arguments, **settings)
        if built:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.01)
        built.append(model)
        return model

    built = []
    monkeypatch.setattr(demo, "build_model", build_another)
    with pytest.raises(ParityError, match=r"losses of compiled differ from eager's by up to .*expected at most 1e-04"):
        run_demo(options(ways=(EAGER, UNCOMPILED)), console)


def test_a_loss_that_is_not_a_number_is_a_difference():
    runs = [Run("eager", [1.0, 1.0], [1.0, 1.0], set()), Run("other", [1.0, float("nan")], [1.0, 1.0], set())]
    with pytest.raises(ParityError, match="by up to inf"):
        DemoResult(runs, {}, [1, 1], 0.5, 1e-4).check("eager")


def test_times_are_medians_of_the_steps_where_no_arm_compiled():
    eager = Run("eager", [1.0] * 7, [9, 9, 9, 2.0, 2.0, 9.0, 2.0], set())
    other = Run("other", [1.0] * 7, [9, 9, 9, 1.0, 30.0, 1.0, 1.0], {0, 4})
    result = DemoResult([eager, other], {}, [100] * 7, 0.5, 1e-4)
    assert result.counted_steps() == [3, 5, 6]
    assert (result.speedup(other), result.median_step_ms(other), result.tokens_per_second(other)) == (
        2.0,
        1000.0,
        100.0,
    )
    assert other.compile_seconds == (9 - 1) + (30 - 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 3}, "steps is 3"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 5000}, "max_length is 5000"),
    ],
)
def test_options_that_cannot_be_run_are_refused(options, wrong, message):
    with pytest.raises(ConfigError, match=message):
        options(**wrong)


def test_a_plot_that_cannot_be_written_is_one_message(options, tmp_path, console):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .* Give another folder with --out"):
        run_demo(options(out=tmp_path / "file", ways=(EAGER,)), console)


@pytest.mark.slow  # one Inductor compile
def test_deepytorch_stays_on_eager_s_path_and_reports(options, tmp_path, console, monkeypatch):
    monkeypatch.delitem(vars(deepytorch), "report")  # its own counters
    LEDGER.forget()
    result = run_demo(options(ways=(EAGER, Way("deepytorch", "deepytorch"))), console)
    assert result.loss_difference(result.runs[1]) < 1e-5
    report = deepytorch.report().to_json()
    assert (report["steps_profiled"], report["steps_packed"]) == (1, 3)
    assert "packed" in console.file.getvalue()
