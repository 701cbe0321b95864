"""`deepytorch bench sharded`: what it refuses, what it makes of measured times, and one small run of it."""

from __future__ import annotations

from typing import Any

import pytest

from deepytorch.bench.run import run_benchmark
from deepytorch.bench.sharded import Sharded, ShardedOptions
from deepytorch.errors import ConfigError
from tests.bench.trained import rank, results


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "huge"}, "expected one of tiny, quarter"),
        ({"setups": ("exact", "int4")}, 'setups has "int4", expected one of gloo, exact, int8, fp8'),
        ({"setups": ()}, "expected one or more of"),
        ({"setups": ("int8", "int8")}, "each once"),
        ({"hosts": 1}, "hosts is 1; expected 2 or more"),
        ({"rate": "fast"}, "fast"),
        ({"steps": 2}, "steps is 2; expected 3 or more"),
        ({"batch_size": 0}, "expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardedOptions(**changes)


def test_figures_are_those_of_the_measured_steps() -> None:
    options = ShardedOptions(steps=5)
    [cell] = Sharded().cells(options)
    first = (5.0, 4.0, 3.0, 2.0)
    found = {
        "exact": [rank([2.0, 1.0, 3.0], losses=[*first, 1.0]), rank([1.0, 1.0, 1.0], losses=[*first, 1.0])],
        "int8": [rank([1.0, 1.0, 4.0], losses=[*first, 1.3]), rank([1.0, 0.5, 1.0], losses=[*first, 1.1])],
    }
    exact, rounded = Sharded().rows(options, cell, found)
    assert exact.figures["step_s"] == 2.0
    assert rounded.figures["speedup"] == 1.0  # the median over pairs of steps
    assert rounded.series["losses"] == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.2])
    assert rounded.figures["last_loss"] == pytest.approx(15.2 / 5)
    measured = results("sharded", [exact, rounded], setups=["exact", "int8"], steps=5)
    [table] = Sharded().tables(measured)
    assert table.columns[2] == "against exact"
    assert table.rows[1] == ("int8", "1,000 ms", "1.00x", "3.0400", f"{15.2 / 15:.4f}")
    assert [points.name for points in Sharded().plots(measured)[0].series] == ["exact", "int8"]


def test_setups_differ_by_the_process_group_alone() -> None:
    [cell] = Sharded().cells(ShardedOptions(setups=("gloo", "exact", "int8", "fp8")))
    assert [setup.job.stock_group for setup in cell.setups] == [True, False, False, False]
    assert [setup.job.quantize for setup in cell.setups] == [None, None, "int8", "fp8"]
    assert all(setup.imports and not setup.job.compiles for setup in cell.setups)


@pytest.mark.matrix
@pytest.mark.lab
@pytest.mark.slow
def test_a_small_run_trains_alike() -> None:
    options = ShardedOptions(size="tiny", setups=("gloo", "exact", "int8"), steps=4, rate="1gbit")
    rows = run_benchmark(Sharded(), options).rows
    assert [row.failed for row in rows] == ["", "", ""]
    gloo, exact, rounded = (row.series["losses"] for row in rows)
    assert exact == pytest.approx(gloo, rel=1e-5)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert min(row.figures["step_s"] for row in rows) > 0
