"""`deepytorch bench loss`: every arm has the same loss, and is measured against eager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepytorch.bench import linear_loss
from deepytorch.cli import app
from deepytorch.errors import ConfigError, ParityError


@pytest.fixture
def in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.slow
@pytest.mark.usefixtures("in_eager")
def test_the_command_writes_time_memory_and_loss_of_every_arm(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    arguments = ["bench", "loss", "--rows", "2048", "--hidden-size", "8", "--vocab-size", "32000", "--rounds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--ignored", "0.25", "--json", str(path)])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    eager, inductor, ours = result["arms"]
    assert (eager["name"], inductor["name"], ours["name"]) == ("eager", "inductor", "deepytorch")
    assert eager["time_ratio"] == eager["memory_ratio"] == 1.0
    assert ours["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert all(arm["seconds"] > 0 for arm in result["arms"])
    # 1,536 rows' logits take 188 MiB: eager holds them, their softmax and a gradient, ours pieces of 256 MiB at most
    assert eager["peak_mb"] > 400
    assert ours["peak_mb"] < eager["peak_mb"]
    assert result["gradients_mb"] == pytest.approx((2048 + 32000) * 8 * 4 / 2**20)


def test_that_many_rows_have_no_label() -> None:
    options = linear_loss.LossOptions(rows=100, hidden_size=4, vocab_size=10, ignored=0.3)
    target = linear_loss._inputs(options, linear_loss.Precision.parse("cpu", "fp32"))[2]
    assert int((target == -100).sum()) == 30
    assert int(target.max()) <= 9


@pytest.mark.usefixtures("in_eager")
def test_another_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_fused", lambda *given: linear_loss._plain(*given) * 1.01)
    with pytest.raises(ParityError, match=r"The loss of deepytorch is .*, eager's"):
        linear_loss.run_loss(linear_loss.LossOptions(rows=8, hidden_size=4, vocab_size=10, rounds=1))


@pytest.mark.parametrize(("options", "message"), [({"rows": 0}, "rows is 0"), ({"ignored": 1.0}, "ignored is 1")])
def test_numbers_that_cannot_be_run_with_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        linear_loss.LossOptions(**options)
