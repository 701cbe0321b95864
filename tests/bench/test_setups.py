"""Steps, precisions, the order of setups, and the instruments: gradients, memory, compilations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.measurement import rotated
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.training_step import (
    ModelSetup,
    Precision,
    compiled_setup,
    empty_compile_caches,
    forward_backward,
)
from deepytorch.errors import ConfigError

CPU = Precision(torch.device("cpu"))


class Regression(nn.Module):
    """The least that looks like a Hugging Face model: keyword inputs, an output with `.loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        out = self.layer(x)
        return Output(out.square().mean(), out.dtype)


class Output(NamedTuple):
    loss: torch.Tensor
    dtype: torch.dtype


def test_a_step_starts_from_no_gradients_and_leaves_its_own():
    model = Regression()
    setup, batch = compiled_setup("eager", model, None), {"x": torch.ones(4, 3)}
    first = forward_backward(setup, batch, CPU)
    gradient = model.layer.weight.grad.clone()
    second = forward_backward(setup, batch, CPU)
    assert first.loss == second.loss == model(**batch).loss.item()
    assert torch.equal(model.layer.weight.grad, gradient)
    assert first.seconds > 0


def test_a_step_that_compiled_says_so_and_the_next_does_not():
    setup, batch = compiled_setup("compiled", Regression(), "aot_eager"), {"x": torch.ones(4, 3)}
    assert [forward_backward(setup, batch, CPU).compiled for _ in range(3)] == [True, False, False]
    assert forward_backward(setup, {"x": torch.ones(5, 3)}, CPU).compiled
    assert not forward_backward(compiled_setup("eager", Regression(), None), batch, CPU).compiled


def test_lower_precision_is_autocast_with_fp32_weights():
    seen = []
    model = Regression()

    def loss(batch):
        output = model(**batch)
        seen.append(output.dtype)
        return output.loss

    for dtype in ("fp32", "bf16"):
        forward_backward(ModelSetup("x", model, loss), {"x": torch.ones(4, 3)}, Precision.parse("cpu", dtype))
    assert seen == [torch.float32, torch.bfloat16]
    assert model.layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [("cpu", "fp8", 'dtype is "fp8", expected one of'), ("tpu", "fp32", 'device "tpu" cannot be used')],
)
def test_unusable_precisions_are_refused(device, dtype, message):
    with pytest.raises(ConfigError, match=message):
        Precision.parse(device, dtype)


def test_every_setup_comes_first_in_turn():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_compile_caches_are_empty_inside_and_as_before_outside(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with empty_compile_caches():
        inside = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(inside.iterdir()) == []
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(inside)
    assert not inside.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/before"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_gradient_difference_is_the_worst_parameter_s():
    model, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    reference.weight.grad, reference.bias.grad = torch.full((2, 2), 2.0), torch.tensor([3.0, 4.0])
    model.weight.grad, model.bias.grad = torch.full((2, 2), 2.0), torch.tensor([3.0, 4.5])
    assert max_relative_difference(model, reference) == pytest.approx(0.1)
    model.weight.grad = None
    assert max_relative_difference(model, reference) == pytest.approx(1.0)


def test_gradient_difference_forgives_noise_where_the_gradient_is_zero_but_not_more():
    model, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (model, reference):
        module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.zeros(2)
    assert max_relative_difference(model, reference) == 0.0
    model.bias.grad = torch.tensor([1e-9, 0.0])
    assert 0 < max_relative_difference(model, reference) < 1e-4
    model.bias.grad = torch.tensor([1e-3, 0.0])
    assert max_relative_difference(model, reference) > 1


def test_gradient_difference_of_nan_is_nan_and_of_nothing_zero():
    model, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    assert max_relative_difference(model, reference) == 0.0
    model.weight.grad = torch.full((2, 2), torch.nan)
    assert torch.isnan(torch.tensor(max_relative_difference(model, reference)))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_peak_bytes_are_those_held_at_once_beyond_the_inputs(backend):
    x = torch.ones(1000, 1000)
    step = torch.compile(_two_at_once, backend=backend) if backend else _two_at_once
    step(x)
    assert peak_step_bytes(lambda: step(x), CPU.device) == pytest.approx(2 * x.nbytes, rel=0.01)


def _two_at_once(x):
    y = x * 2
    y = y.exp()  # both for a moment
    return y.sum()
