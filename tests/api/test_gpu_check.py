"""`deepytorch gpu-check`: its checks hold where all is well, and find what is wrong. They run on the CPU here."""

from __future__ import annotations

import sys

import pytest
import torch

from deepytorch.errors import ConfigError
from deepytorch.gpu_check import checks, gpu_check
from deepytorch.gpu_check.isolated import run_groups
from deepytorch.gpu_check.outcome import Failed
from tests.api import checks_that_go_wrong
from tests.api.checks_that_go_wrong import SLOW_CHECKS, TIMED_CHECKS, WRONG_CHECKS

CPU = torch.device("cpu")
WORKER = (sys.executable, checks_that_go_wrong.__file__)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", checks._LOSSES.values(), ids=checks._LOSSES.keys())
def test_the_loss_is_as_near_as_eagers(dtype, options):
    assert "off by" in checks._loss_is_right(CPU, dtype, options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", checks._ATTENTIONS.values(), ids=checks._ATTENTIONS.keys())
def test_attention_is_as_near_as_eagers(dtype, options):
    assert "off by" in checks._attention_is_right(CPU, dtype, options)


def test_a_wrong_loss_fails(monkeypatch):
    right = checks.linear_cross_entropy
    monkeypatch.setattr(checks, "linear_cross_entropy", lambda *given, **named: right(*given, **named) * 1.001)
    with pytest.raises(Failed, match="loss is off by"):
        checks._loss_is_right(CPU, "fp32", {})


def test_wrong_attention_fails(monkeypatch):
    right = checks.varlen_attention
    monkeypatch.setattr(checks, "varlen_attention", lambda *given, **named: right(*given, **{**named, "scale": 0.126}))
    with pytest.raises(Failed, match="output is off by"):
        checks._attention_is_right(CPU, "fp32", {"window_right": 0})


def test_failures_come_first_and_whatever_ends_a_process_ends_one_check():
    found = checked(*WRONG_CHECKS)
    by_name = {(each.group, each.name): each for each in found}
    assert len(by_name) == len(found) == len(WRONG_CHECKS)
    assert {name: each.passed for name, each in by_name.items()} == {
        ("fine", "first"): True, ("fine", "cannot"): None, ("fine", "wrong"): False, ("fine", "raises"): False,
        ("crashes", "ends"): False, ("crashes", "behind it"): True,
        ("hangs", "stands still"): False, ("hangs", "behind it"): True,
        ("breaks", "illegal"): False, ("breaks", "behind it"): True,
    }  # fmt: skip
    said = {name: each.said for (_, name), each in by_name.items() if not each.passed}
    assert said["cannot"] == "no such device"
    assert said["wrong"] == "twice as much"
    assert said["raises"].startswith("RuntimeError: out of memory")
    assert "was ended by SIGSEGV" in said["ends"]
    assert "last words of a kernel" in said["ends"]
    assert "was not over within 1 s" in said["stands still"]
    assert "an illegal memory access" in said["illegal"]
    # behind an error that leaves the device unusable another process goes on
    assert by_name["breaks", "behind it"].said != "the process that broke it"


def test_what_is_timed_runs_alone_and_last():
    found = checked(*TIMED_CHECKS)
    assert [each.passed for each in found] == [True] * 3
    (begin, end), *others = [tuple(map(float, each.said.split())) for each in sorted(found, key=lambda e: e.group)][
        ::-1
    ]
    assert all(other_end <= begin for _, other_end in others)
    assert end > begin


def test_what_is_not_over_in_time_is_told_as_not_made():
    found = run_groups(SLOW_CHECKS, "cpu", 1.0, worker=WORKER)
    assert [(each.passed, each.said) for each in found] == [(None, "not over within 1 s")] * 2


def test_a_process_that_cannot_begin_is_told_for_each_of_its_checks():
    found = run_groups(SLOW_CHECKS, "cpu", 30, worker=(sys.executable, "-c", "raise SystemExit('no torch here')"))
    assert [each.passed for each in found] == [False, False]
    assert all("ended with status 1" in each.said and "no torch here" in each.said for each in found)


def test_a_group_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="no group 'speeed'; expected some of: linear"):
        gpu_check("cpu", only=["speeed"])


def test_groups_are_chosen_and_figures_left_out_where_it_has_to_be_quick(monkeypatch):
    asked = []
    monkeypatch.setattr("deepytorch.gpu_check.run_groups", lambda wanted, *_: asked.extend(wanted) or [])
    gpu_check("cpu", quick=True)
    assert asked
    assert not any(each.is_timed for each in asked)
    asked.clear()
    gpu_check("cpu", only=["speed", "attention"])
    assert {each.group for each in asked} == {"speed", "attention"}


def checked(*made):
    return run_groups(made, "cpu", 120, worker=WORKER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said():
    with pytest.raises(ConfigError, match="no CUDA device"):
        gpu_check()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
def test_models_train_as_eager_does():
    for model in checks._MODELS:
        assert "off by" in checks._trains_as_eager(CPU, model, "fp32")
