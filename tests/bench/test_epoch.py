"""`deepytorch bench epoch`: the same rows in both orders; what counts is all tokens over all time."""

from __future__ import annotations

from typing import Any

import pytest

from deepytorch.bench.epoch import SETUPS, Epoch, EpochOptions
from deepytorch.bench.run import run_benchmark
from tests.bench.trained import rank, results


def test_each_setup_has_its_compiler_and_its_order() -> None:
    [cell] = Epoch().cells(EpochOptions(batches=5, rounds=2))
    jobs = {setup.name: (setup.imports, setup.job.parallel.compile, setup.job.data) for setup in cell.setups}
    assert jobs == {
        "inductor+grouped": (False, "inductor", "grouped"),
        "inductor+random": (False, "inductor", "random"),
        "deepytorch+random": (True, "", "random"),
        "deepytorch+grouped": (True, "", "grouped"),
    }
    assert {(setup.job.warm_up, setup.job.steps, setup.job.optimizer) for setup in cell.setups} == {(5, 10, "adamw")}


def trained(*seconds: float, **changes: Any) -> list[dict[str, Any]]:
    given = {"tokens": 100.0, "positions": 200.0, "batches": 2, "plan": "packed", "losses": [2.0]}
    return [rank([*seconds], warm_up=[9.0], **given | changes)]


def test_rates_are_of_whole_passes_and_losses_of_the_same_batches() -> None:
    options, bench = EpochOptions(batches=2, rounds=3), Epoch()
    [cell] = bench.cells(options)
    found = {
        "inductor+grouped": trained(1.0, 3.0, 1.0, 3.0, 50.0, 3.0, positions=125.0),
        "inductor+random": trained(4.0, 4.0, 4.0, 4.0, 4.0, 4.0, losses=[4.0]),
        "deepytorch+random": trained(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, losses=[4.4]),
    }
    rows = bench.rows(options, cell, found)
    figures = {str(row.key["setup"]): row.figures for row in rows}
    assert [figures[name]["tokens_per_s"] for name in found] == [50.0, 25.0, 100.0]
    assert [figures[name]["speedup"] for name in found] == [1.0, 0.5, 2.0]
    assert figures["inductor+grouped"]["real_token_fraction"] == 0.8
    assert figures["deepytorch+random"]["loss_rel_diff"] == pytest.approx(0.1)
    assert "loss_rel_diff" not in figures["inductor+random"]
    [table] = bench.tables(results("epoch", rows, device="cpu", batches=2, rounds=3))
    assert table.rows[2] == ("deepytorch", "random", "100", "2.00x", "50 %", "packed")


@pytest.mark.slow
@pytest.mark.matrix
def test_a_small_run_has_the_same_tokens_with_fewer_pads_where_rows_are_grouped() -> None:
    options = EpochOptions(setups=SETUPS[2:], batch_size=2, batches=4, rounds=1)
    shuffled, grouped = run_benchmark(Epoch(), options).rows
    assert not shuffled.failed + grouped.failed
    assert shuffled.figures["tokens_per_s"] > 0
    assert shuffled.figures["real_token_fraction"] < grouped.figures["real_token_fraction"] <= 1.0
