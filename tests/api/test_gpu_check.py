"""`deepytorch gpu-check`: its checks hold where all is well, and find what is wrong. They run on the CPU here."""

from __future__ import annotations

import pytest
import torch

from deepytorch import gpu_check as checks
from deepytorch.errors import ConfigError

CPU = torch.device("cpu")


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
    with pytest.raises(checks.Failed, match="loss is off by"):
        checks._loss_is_right(CPU, "fp32", {})


def test_wrong_attention_fails(monkeypatch):
    right = checks.varlen_attention
    monkeypatch.setattr(checks, "varlen_attention", lambda *given, **named: right(*given, **{**named, "scale": 0.126}))
    with pytest.raises(checks.Failed, match="output is off by"):
        checks._attention_is_right(CPU, "fp32", {"window_right": 0})


def test_each_check_stands_for_itself_and_failures_come_first(monkeypatch):
    def breaks() -> str:
        raise RuntimeError("out of memory")

    def is_wrong() -> str:
        raise checks.Failed("twice as much")

    def cannot() -> str:
        raise checks.Skipped("no such device")

    made = [("fine", lambda: "0.1 ms"), ("breaks", breaks), ("cannot", cannot), ("wrong", is_wrong)]
    monkeypatch.setattr(checks, "_checks", lambda place: [checks._Check("test", name, run) for name, run in made])
    found = checks.gpu_check("cpu")
    assert [(each.name, each.passed) for each in found] == [
        ("breaks", False), ("wrong", False), ("cannot", None), ("fine", True)
    ]  # fmt: skip
    assert "RuntimeError: out of memory" in found[0].said
    assert checks.to_json(found, "cpu")["checks"][1]["said"] == "twice as much"
    late = checks.gpu_check("cpu", seconds=-1.0)
    assert all(each.passed is None and "not begun" in each.said for each in late)


def test_figures_are_left_out_when_it_has_to_be_quick(monkeypatch):
    every = [checks._Check("speed", "slow", lambda: "1 ms", quick=False), checks._Check("parity", "one", lambda: "")]
    monkeypatch.setattr(checks, "_checks", lambda place: every)
    assert [each.name for each in checks.gpu_check("cpu", quick=True)] == ["one"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said():
    with pytest.raises(ConfigError, match="no CUDA device"):
        checks.gpu_check()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
def test_models_train_as_eager_does():
    for model in checks._MODELS:
        assert "off by" in checks._trains_as_eager(CPU, model, "fp32")
