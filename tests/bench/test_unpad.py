"""The measurement: same batches, right counts, honest ratios."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import deepytorch
from deepytorch.bench import unpad
from deepytorch.bench.models import batch_kind
from deepytorch.bench.training_step import Step
from deepytorch.bench.unpad import Measurement, UnpadOptions, draw_batches, full_batches, run_unpad
from deepytorch.compiler.report import LEDGER
from deepytorch.data import IGNORE_INDEX, num_labels, num_positions, num_tokens
from deepytorch.errors import ConfigError, ParityError

CPU = torch.device("cpu")
COUNTS = {"recompiles": 1, "steps_packed": 7, "steps_padded": 2, "host_ms_per_step": 0.25}


class Report:
    def to_json(self):
        return COUNTS


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    """Replace the backend's counters: the arms of these tests run without it."""
    monkeypatch.setitem(vars(deepytorch), "report", lambda reset=False: Report())


@pytest.fixture
def options(rows_file):
    return partial(_options, data=rows_file)


def _options(**changes) -> UnpadOptions:
    smallest = {"size": "tiny", "steps": 2, "rounds": 2, "batch_size": 4, "max_length": 256, "vocab_size": 400}
    return UnpadOptions(**smallest | {"backend": "eager", "stock_backend": "eager"} | changes)  # traced, not lowered


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "bart"])
def test_every_arm_is_measured_on_the_same_batches(options, model):
    told = []
    result = run_unpad(options(model=model), told.append)
    arms = {"eager", "inductor", "deepytorch"} | ({"handpacked"} if model == "llama" else set())
    assert set(result.step_ms) == arms
    assert (result.ratio_vs_handpacked is None) is (model != "llama")
    assert result.max_loss_rel_diff < 1e-6
    assert result.max_grad_rel_diff < 1e-5
    assert (result.steps_packed, result.steps_padded, result.recompiles) == (7, 2, 1)
    assert result.compile_seconds > 0
    assert result.compile_seconds_inductor > 0
    assert 0.5 < result.peak_memory_ratio_vs_eager < 2
    data = draw_batches(options(model=model), CPU)
    kind = batch_kind(model)
    assert result.real_token_fraction == pytest.approx(
        sum(num_tokens(batch, kind) for batch in data) / sum(num_positions(batch, kind) for batch in data)
    )
    assert "Measuring: round 2 of 2, batch 2 of 2" in told


def test_labels_decide_what_is_labelled(options):
    response, everything = (draw_batches(options(labels=labels), CPU) for labels in ("response", "all"))
    for some, every in zip(response, everything, strict=True):
        assert torch.equal(some["input_ids"], every["input_ids"])
        assert num_labels(every) == num_tokens(every, "causal")
        assert 0 < num_labels(some) < 0.9 * num_labels(every)


def test_a_wrong_gradient_shows(options, monkeypatch):
    arms = unpad.build_arms

    def spoilt(*arguments):
        made = arms(*arguments)
        made["deepytorch"].model.lm_head.weight.register_hook(lambda grad: grad * 1.01)
        return made

    monkeypatch.setattr(unpad, "build_arms", spoilt)
    result = run_unpad(options(steps=1, rounds=1))
    assert result.max_grad_rel_diff == pytest.approx(0.01, rel=0.05)
    assert result.max_loss_rel_diff < 1e-6


def test_a_loss_that_is_not_a_number_stops_the_measurement(options, monkeypatch):
    arms = unpad.build_arms

    def spoilt(*arguments):
        made = arms(*arguments)
        torch.nn.init.constant_(made["deepytorch"].model.lm_head.weight, torch.nan)
        return made

    monkeypatch.setattr(unpad, "build_arms", spoilt)
    with pytest.raises(ParityError, match="the loss in deepytorch is nan"):
        run_unpad(options(steps=1, rounds=1))


@pytest.mark.parametrize("model", ["llama", "bert", "t5"])
def test_full_batches_hold_the_same_tokens_without_padding(options, model):
    kind = batch_kind(model)
    data = draw_batches(options(model=model), CPU)
    full = full_batches(data, kind)
    assert len(full) == len(data)
    assert all(len(batch["input_ids"]) == 4 and batch["attention_mask"].all() for batch in full)
    tokens = sum(num_tokens(batch, kind) for batch in data)
    kept = sum(num_tokens(batch, kind) for batch in full)
    assert tokens - kept < 2 * len(full) * 4  # what does not fill a last column of positions, on each side
    if kind == "masked":
        assert 0.1 < sum(map(num_labels, full)) / kept < 0.2
    else:
        assert all((batch["labels"] != IGNORE_INDEX).all() for batch in full)


def test_ratios_compare_whole_runs_by_medians_over_the_rounds():
    seconds = {"eager": [[4.0, 4.0, 90.0], [2.0, 2.0, 2.0]], "deepytorch": [[1.0, 1.0, 1.0], [2.0, 1.0, 2.0]]}
    measured = Measurement(seconds)
    assert measured.ratio("eager") == (4.0 + 2.0) / (1.0 + 2.0)
    assert measured.ratio_quartiles("eager") == [1.75, 2.5, 3.25]


def test_compile_time_is_what_compiling_steps_took_beyond_steady_ones():
    first = [Step(0.0, 10.0, compiled=True), Step(0.0, 8.0, compiled=False), Step(0.0, 5.0, compiled=True)]
    assert unpad._compile_seconds(first, [1.0, 1.0, 2.0]) == 9.0 + 3.0


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"rounds": 0}, {"batch_size": 0}, {"max_length": 5000}])
def test_options_that_cannot_be_run_are_refused(options, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
        options(**wrong)


@pytest.mark.slow  # one Inductor compile
@pytest.mark.matrix
def test_the_backend_packs_every_batch_without_a_recompile(options, monkeypatch):
    monkeypatch.delitem(vars(deepytorch), "report")  # its own counters
    LEDGER.forget()
    result = run_unpad(options(backend="deepytorch"))
    assert (result.steps_packed, result.steps_padded, result.recompiles) == (2 + 2 * 2 - 1, 0, 0)  # one was watched
    assert result.max_loss_rel_diff < 1e-5
    assert result.max_grad_rel_diff < 1e-4
    assert result.peak_memory_ratio_vs_eager < 1
    assert 0 < result.host_ms_per_step < 100


def test_a_step_that_compiles_is_measured_again(monkeypatch):
    steps = [Step(1.0, 30.0, compiled=True), Step(1.0, 2.0, compiled=False), Step(1.0, 3.0, compiled=False)]
    monkeypatch.setattr(unpad, "forward_backward", lambda *_: steps.pop(0))
    assert [unpad._steady_step(None, None, None).seconds for _ in range(2)] == [2.0, 3.0]
