"""`deepytorch bench acspeed`: its cells, its lines and table, the scatter, and one small run of it."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench.acspeed import DDP, HALF, OURS, ROWS, Acspeed, AcspeedOptions, linearity
from deepytorch.bench.results import Results
from deepytorch.bench.run import run_benchmark
from deepytorch.errors import ConfigError
from tests.bench.trained import rank, results


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ("vgg17",)}, "expected one of alexnet"),
        ({"scale": "huge"}, "expected one of full, small"),
        ({"precision": "fp8"}, "expected one of fp32, mixed"),
        ({"device": "tpu"}, "expected one of cpu, cuda"),
        ({"hosts": (0,)}, "hosts has 0; expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AcspeedOptions(**changes)


def test_one_host_has_no_rate_and_several_have_each() -> None:
    options = AcspeedOptions(models=("vgg16",), hosts=(1, 2), rates=("1gbit", "200mbit"), compress=True, scale="small")
    cells = Acspeed().cells(options)
    assert [(cell.key["hosts"], cell.key["rate"]) for cell in cells] == [(1, None), (2, "1gbit"), (2, "200mbit")]
    assert [[setup.name for setup in cell.setups] for cell in cells] == [
        [DDP, OURS],
        [DDP, OURS, HALF],
        [DDP, OURS, HALF],
    ]
    assert [setup.imports for setup in cells[1].setups] == [False, True, True]
    assert [setup.job.compress for setup in cells[1].setups] == [None, None, "bf16"]
    assert {setup.job.rows for cell in cells for setup in cell.setups} == {ROWS["vgg16"][1]}


def measured(**seconds: dict[str, float]) -> Results:
    """Return results of VGG-16 on one host and on two: `seconds[setup][hosts]` a step."""
    options = AcspeedOptions(models=("vgg16",), hosts=(1, 2), rates=("200mbit",), compress=True, scale="small")
    rows = []
    for cell in Acspeed().cells(options):
        names = {"ddp": DDP, "ours": OURS, "half": HALF}
        found = {
            names[name]: [rank([by_hosts[cell.key["hosts"]]] * 4), rank([by_hosts[cell.key["hosts"]]] * 4)]  # type: ignore[index]
            for name, by_hosts in seconds.items()
            if cell.key["hosts"] in by_hosts
        }
        rows += Acspeed().rows(options, cell, found)
    return Results(
        benchmark="acspeed", command="", options=asdict(options), machine="", versions={}, date="", rows=rows
    )


def test_gain_and_linearity_are_those_of_the_published_table() -> None:
    results = measured(ddp={1: 1.0, 2: 2.0}, ours={1: 0.8, 2: 1.0}, half={2: 0.5})  # type: ignore[dict-item]
    [ours] = results.having(hosts=2, setup=OURS)
    assert ours.figures["acc_ratio"] == pytest.approx(2.0)
    assert ours.figures["examples_per_s"] == pytest.approx(8.0)
    assert linearity(results, ours, DDP) == pytest.approx(0.5)  # a rank's examples a second are half of those alone
    assert linearity(results, ours, OURS) == pytest.approx(0.8)
    [half] = results.having(hosts=2, setup=HALF)
    assert linearity(results, half, HALF) == pytest.approx(1.6)  # against the exact setup on one host
    tables = Acspeed().tables(results)
    assert tables[1].rows[0] == ("vgg16", "4.0", "0.50", "8.0", "0.80", "2.00x", "16.0", "1.60", "4.00x")
    [plot] = Acspeed().plots(results)
    [points] = plot.series
    assert (points.x, points.y, points.labels) == ((0.5,), (2.0,), ("vgg16",))


def test_the_error_of_a_gain_is_that_of_steps_that_took_turns() -> None:
    [cell] = Acspeed().cells(AcspeedOptions(models=("vgg16",)))
    found = {DDP: [rank([2.0, 6.0, 4.0, 4.0])], OURS: [rank([1.0, 3.0, 1.0, 4.0])]}  # 2, 2, 4 and 1 times as fast
    _, ours = Acspeed().rows(AcspeedOptions(models=("vgg16",)), cell, found)
    relative = math.sqrt(sum((each - 2.25) ** 2 for each in (2, 2, 4, 1)) / 3) / 2.25
    assert ours.figures["acc_ratio"] == pytest.approx(2.0)
    assert ours.figures["acc_ratio_error"] == pytest.approx(2.0 * relative / 2)
    [table] = Acspeed().tables(results("acspeed", [ours]))
    assert "2.00x ± 0.56" in table.rows[0]


def test_lines_are_those_of_pytorchs_benchmark() -> None:
    results = measured(ddp={1: 0.5}, ours={1: 0.25})  # type: ignore[dict-item]
    stock, ours = Acspeed().lines(results.rows)
    assert "2 ranks -- 1M/2R:  p50:   0.500s     16/s  p75:   0.500s" in stock
    assert "p95:   0.250s     32/s" in ours


def test_losses_that_differ_are_said() -> None:
    options = AcspeedOptions(models=("vgg16",))
    [cell] = Acspeed().cells(options)
    found = {DDP: [rank([1.0])], OURS: [rank([1.0], losses=[2.0, 1.1])]}
    _, ours = Acspeed().rows(options, cell, found)
    assert ours.figures["loss_rel_diff"] == pytest.approx(0.1)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    options = AcspeedOptions(models=("alexnet", "resnet18"), scale="small", precision="fp32", steps=3, warm_up=3)
    results = run_benchmark(Acspeed(), options, tmp_path / "acspeed.json", timeout_s=200.0)
    assert [row.failed for row in results.rows] == [""] * 4
    assert all(row.figures["loss_rel_diff"] < 1e-5 for row in results.having(setup=OURS))
