"""The measurement: same batches, right counts, honest ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deepytorch
from deepytorch.bench import unpad_steps
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.models import batch_kind
from deepytorch.bench.results import Row
from deepytorch.bench.training_step import Step
from deepytorch.bench.unpad import OURS, Unpad, UnpadOptions, rows_of
from deepytorch.bench.unpad_steps import draw_batches, full_batches, measure
from deepytorch.compiler.report import LEDGER
from deepytorch.data import IGNORE_INDEX, num_labels, num_positions, num_tokens
from deepytorch.errors import ConfigError, ParityError
from tests.bench.trained import results

CPU = torch.device("cpu")


def figures_of(job, told=lambda text: None):
    return {row.key["setup"]: row.figures for row in rows_of(measure(job, told))}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "bart"])
def test_every_setup_is_measured_on_the_same_batches(job, model):
    told = []
    found = figures_of(job(model, rounds=2), told.append)
    ours, eager = found[OURS], found["eager"]
    assert set(found) == {"eager", "inductor", "deepytorch"} | ({"handpacked"} if model == "llama" else set())
    assert ours["loss_rel_diff"] < 1e-6
    assert ours["grad_rel_diff"] < 1e-5
    assert (ours["steps_packed"], ours["steps_padded"], ours["recompiles"]) == (7, 2, 1)
    assert ours["compile_s"] > 0
    assert found["inductor"]["compile_s"] > 0
    assert 0.5 < ours["peak_mb"] / eager["peak_mb"] < 2
    data = draw_batches(job(model), CPU)
    kind = batch_kind(model)
    assert ours["real_token_fraction"] == pytest.approx(
        sum(num_tokens(batch, kind) for batch in data) / sum(num_positions(batch, kind) for batch in data)
    )
    assert "Measuring: round 2 of 2, batch 2 of 2" in told


def test_labels_decide_what_is_labelled(job):
    response, everything = (draw_batches(job(labels=labels), CPU) for labels in ("response", "all"))
    for some, every in zip(response, everything, strict=True):
        assert torch.equal(some["input_ids"], every["input_ids"])
        assert num_labels(every) == num_tokens(every, "causal")
        assert 0 < num_labels(some) < 0.9 * num_labels(every)


def test_a_wrong_gradient_shows(job, monkeypatch):
    build = unpad_steps.build_setups

    def spoilt(*arguments):
        made = build(*arguments)
        made["deepytorch"].model.lm_head.weight.register_hook(lambda grad: grad * 1.01)
        return made

    monkeypatch.setattr(unpad_steps, "build_setups", spoilt)
    ours = figures_of(job(steps=1))[OURS]
    assert ours["grad_rel_diff"] == pytest.approx(0.01, rel=0.05)
    assert ours["loss_rel_diff"] < 1e-6


def test_a_loss_that_is_not_a_number_stops_the_measurement(job, monkeypatch):
    build = unpad_steps.build_setups

    def spoilt(*arguments):
        made = build(*arguments)
        torch.nn.init.constant_(made["deepytorch"].model.lm_head.weight, torch.nan)
        return made

    monkeypatch.setattr(unpad_steps, "build_setups", spoilt)
    with pytest.raises(ParityError, match="the loss in deepytorch is nan"):
        measure(job(steps=1))


@pytest.mark.parametrize("model", ["llama", "bert", "t5"])
def test_full_batches_hold_the_same_tokens_without_padding(job, model):
    kind = batch_kind(model)
    data = draw_batches(job(model), CPU)
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
    assert unpad_steps._compile_seconds(first, [1.0, 1.0, 2.0]) == 9.0 + 3.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"models": ("lama",)}, 'models has "lama"'),
        ({"size": "huge"}, 'size is "huge"'),
        ({"labels": "some"}, 'labels is "some"'),
        ({"precision": "fp8"}, 'precision is "fp8"'),
        ({"precision": "fp16", "back_to_back": True}, "gradient scaler"),
        ({"models": ("llama", "bert"), "loss": "outside"}, "expected decoders, not bert"),
    ],
)
def test_options_that_cannot_be_run_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        UnpadOptions(**wrong)


RUN = {
    "seconds": {
        "eager": [[0.2, 0.2, 9.0], [0.4, 0.4, 0.4]],
        "deepytorch": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]],
        "grouped": [[0.3, 0.3, 0.3], [0.3, 0.3, 0.3]],
    },
    "tokens": 100,
    "loss_rel_diff": {"deepytorch": 1e-7},
    "grad_rel_diff": {"deepytorch": 1e-6},
    "compile_s": {"deepytorch": 20.0},
    "peak_mb": {"eager": 10.0, "deepytorch": 4.0},
    "shared": {
        "real_token_fraction": 0.5,
        "token_ceiling": 2.0,
        "labelled_fraction": 0.7,
        "no_padding_ratio": 1.03,
        "host_ms": 0.4,
        "recompiles": 1,
        "steps_packed": 24,
        "steps_padded": 0,
    },
    "texts": {"device": "cpu", "timing": "one by one", "not measured": "flattened, flash-attn not installed"},
}


def test_a_row_for_each_setup_and_what_they_share_in_one():
    eager, ours, grouped = rows_of(RUN, {"model": "llama"})
    assert eager.key == {"model": "llama", "setup": "eager"}
    assert eager.figures == pytest.approx({"step_s": 0.3, "tokens_per_s": 100 / 0.6, "ratio": 3.0, "peak_mb": 10.0})
    assert eager.series == {"ratio_quartiles": pytest.approx([2.5, 3.0, 3.5])}
    assert grouped.series == {}
    assert "ratio" not in ours.figures
    assert ours.figures["steps_packed"] == 24


def test_the_table_has_the_gains_and_the_remarks():
    bench, options = Unpad(), UnpadOptions(models=("llama", "gpt2"))
    llama, gpt2 = bench.cells(options)
    rows = bench.rows(options, llama, {OURS: [RUN]})
    failed = Row(key={**gpt2.key, "setup": OURS}, failed="out of memory")
    one, other = bench.tables(results("unpad", [*rows, failed]))
    assert one.title == "llama, small, batch 8, labels response, loss model, fp32, cpu, one by one"
    assert one.rows[0] == ("eager", "300.0", "167", "3.00x", "2.50 - 3.50", "", "10")
    assert (
        one.notes[1] == "Against eager: loss within 1.0e-07, gradients within 1.0e-06 (relative), peak memory x 0.40."
    )
    assert one.notes[4] == "Not measured: flattened, flash-attn not installed."
    assert other.rows == ()
    assert other.notes == ("gpt2: out of memory.",)


def test_the_table_names_a_setup_whose_gradients_are_others():
    far = Row(key={"model": "llama", "setup": "handpacked"}, figures={"step_s": 1.0, "grad_rel_diff": 1.43})
    near = Row(key={"model": "llama", "setup": "inductor"}, figures={"step_s": 1.0, "grad_rel_diff": 2e-2})
    key = dict.fromkeys(("size", "batch_size", "labels", "loss", "precision"), "")
    rows = [replace(row, key=row.key | key) for row in (far, near)]
    [table] = Unpad().tables(results("unpad", rows))
    assert table.notes == ("Gradients of handpacked are 1.4e+00 from those of eager.",)


@pytest.mark.slow  # one Inductor compile
@pytest.mark.matrix
def test_the_backend_packs_every_batch_without_a_recompile(job, monkeypatch):
    monkeypatch.delitem(vars(deepytorch), "report")  # its own counters
    LEDGER.forget()
    found = figures_of(job(backend="deepytorch", rounds=2))
    ours = found[OURS]
    # one was watched
    assert (ours["steps_packed"], ours["steps_padded"], ours["recompiles"]) == (2 + 2 * 2 - 1, 0, 0)
    assert ours["loss_rel_diff"] < 1e-5
    assert ours["grad_rel_diff"] < 1e-4
    assert ours["peak_mb"] < found["eager"]["peak_mb"]
    assert 0 < ours["host_ms"] < 100


def test_a_step_that_compiles_is_measured_again(monkeypatch):
    steps = [Step(1.0, 30.0, compiled=True), Step(1.0, 2.0, compiled=False), Step(1.0, 3.0, compiled=False)]
    monkeypatch.setattr(unpad_steps, "forward_backward", lambda *_: steps.pop(0))
    assert [unpad_steps._steady_step(None, None, None).seconds for _ in range(2)] == [2.0, 3.0]
