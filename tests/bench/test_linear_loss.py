"""`deepytorch bench loss`: every setup has the same loss, and is measured against eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepytorch.bench import linear_loss
from deepytorch.bench.loss import Loss, LossOptions
from deepytorch.bench.run import run_benchmark
from deepytorch.errors import ConfigError, ParityError
from tests.bench.trained import results

SMALLEST = LossOptions(rows=8, hidden_size=4, vocab_size=10, rounds=1)


@pytest.fixture
def in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.slow
@pytest.mark.usefixtures("in_eager")
def test_time_memory_and_loss_of_every_setup() -> None:
    found = linear_loss.measure(LossOptions(rows=2048, hidden_size=8, vocab_size=32000, rounds=1, ignored=0.25))
    assert list(found) == ["eager", "inductor", "deepytorch"]
    eager, ours = found["eager"], found["deepytorch"]
    assert ours["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert all(each["step_s"] > 0 for each in found.values())
    # 1,536 rows' logits take 188 MiB: eager holds them, their softmax and a gradient, ours pieces of 256 MiB at most
    assert eager["peak_mb"] > 400
    assert ours["peak_mb"] < eager["peak_mb"]
    assert eager["gradients_mb"] == pytest.approx((2048 + 32000) * 8 * 4 / 2**20)


@pytest.mark.slow  # one Inductor compile
@pytest.mark.matrix
def test_a_small_run() -> None:
    measured = run_benchmark(Loss(), SMALLEST)
    assert [row.key["setup"] for row in measured.rows] == ["eager", "inductor", "deepytorch"]
    assert not any(row.failed for row in measured.rows)


def test_the_table_compares_with_eager() -> None:
    measured = {
        "eager": {"step_s": 2.0, "peak_mb": 400.0, "loss": 12.25, "gradients_mb": 100.0},
        "deepytorch": {"step_s": 1.0, "peak_mb": 100.0, "loss": 12.25, "gradients_mb": 100.0},
    }
    bench = Loss()
    rows = bench.rows(SMALLEST, bench.cells(SMALLEST)[0], {"deepytorch": [measured]})
    assert [row.figures["speedup"] for row in rows] == [1.0, 2.0]
    asked = {"rows": 8, "hidden_size": 4, "vocab_size": 10, "ignored": 0.0, "dtype": "fp32", "device": "cpu"}
    [table] = bench.tables(replace(results("loss", rows), options=asked))
    assert table.title == "Linear and cross-entropy, 8 x 4 x 10, 0 % ignored, fp32, cpu; gradients 100 MiB"
    assert table.rows[1] == ("deepytorch", "1,000.0", "0.50", "100", "0.25", "12.25000")


def test_that_many_rows_have_no_label() -> None:
    options = LossOptions(rows=100, hidden_size=4, vocab_size=10, ignored=0.3)
    target = linear_loss._inputs(options, linear_loss.Precision.parse("cpu", "fp32"))[2]
    assert int((target == -100).sum()) == 30
    assert int(target.max()) <= 9


@pytest.mark.usefixtures("in_eager")
def test_another_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_fused", lambda *given: linear_loss._plain(*given) * 1.01)
    with pytest.raises(ParityError, match=r"The loss of deepytorch is .*, eager's"):
        linear_loss.measure(SMALLEST)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rows": 0}, "rows is 0"), ({"ignored": 1.0}, "ignored is 1"), ({"dtype": "fp8"}, 'dtype is "fp8"')],
)
def test_options_that_cannot_be_run_with_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossOptions(**options)
