"""`deepytorch bench compute`: its rows and table, the point from which it is ahead, and one small run of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench.compute import Compute, ComputeOptions, break_even
from deepytorch.bench.results import Results, Row
from deepytorch.bench.run import run_benchmark
from deepytorch.bench.settling import plan_of
from deepytorch.compiler.report import RegionRecord
from tests.bench.trained import rank, results
from tests.processes import children_of, is_running


def rows_of(found: dict[str, Any], **options: Any) -> Results:
    """Return the results of VGG-16 in these setups."""
    asked = ComputeOptions(models=("vgg16",), setups=("eager", "inductor", "recipe", "deepytorch"), **options)
    [cell] = Compute().cells(asked)
    rows = Compute().rows(asked, cell, found)
    return results("compute", rows, **asdict(asked))


def test_ratios_are_medians_over_pairs_of_steps() -> None:
    found = rows_of(
        {
            "eager": [rank([2.0, 2.0, 9.0], process_mb=100.0)],
            "inductor": [rank([1.5, 1.5, 1.5], losses=[2.0, 1.1])],
            "recipe": [rank([0.5, 0.5, 0.5])],
            "deepytorch": [rank([1.0, 1.0, 1.0], process_mb=150.0, plan="channels last")],
        }
    )
    assert [row.figures["ratio"] for row in found.rows] == [2.0, 1.5, 0.5, 1.0]
    assert found.rows[1].figures["loss_rel_diff"] == pytest.approx(0.1)
    [table] = Compute().tables(found)
    # ahead of eager: a first step of 3 s is a second late, made up in the first of the next steps
    assert table.rows == (
        ("vgg16", "2,000.0", "1,500.0", "500.0", "1,000.0", "2.00x", "1.50x", "4", "1.50", "0e+00", "channels last"),
    )


def test_a_setup_that_was_faster_alone_is_named() -> None:
    found = rows_of({"eager": [rank([9.0, 3.0, 3.0], warm_up=[1.5] * 6)], "deepytorch": [rank([1.0] * 3)]})
    [table] = Compute().tables(found)
    [note] = table.notes
    assert note.startswith("vgg16, eager: 2.0 times as long in turns as alone before")


def test_a_setup_that_failed_is_named() -> None:
    found = rows_of({"eager": [rank([2.0])], "deepytorch": [rank([1.0])]})
    failed = Row(key={**found.rows[0].key, "setup": "inductor"}, failed="out of memory")
    [table] = Compute().tables(Results(**{**asdict(found), "rows": [*found.rows, failed]}))
    assert table.rows[0][1:7] == ("2,000.0", "", "", "1,000.0", "2.00x", "")
    assert table.notes == ("vgg16, inductor: out of memory.",)


@pytest.mark.parametrize(
    ("warm_up", "settled", "seconds"),
    [
        ([1.0, 1.0], 0.5, 0.0),  # never behind
        ([3.0, 0.5, 0.5, 0.5, 0.5, 0.5], 0.5, 5.0),  # two seconds late, made up by half a second a step
        ([5.0, 0.5], 0.5, 9.0),  # not yet made up as the steps are timed
        ([3.0, 1.0], 1.0, None),
    ],
)
def test_the_seconds_until_more_steps_are_done_than_in_eager(
    warm_up: list[float], settled: float, seconds: float | None
) -> None:
    assert break_even(warm_up, [settled] * 3, [1.0, 1.0, 9.0]) == seconds


def record(**fields: Any) -> RegionRecord:
    return RegionRecord("region", "declined", "inductor", **fields)


@pytest.mark.parametrize(
    ("regions", "plan"),
    [
        ([], "eager"),
        ([record(trials=["channels last: 1.43 times as fast as eager, used from now on"])], "channels last"),
        ([record(trials=["compiled: 0.9 times as fast as eager, not used"])], "eager"),
        ([record(steps_packed=3), record(compiled_by="a process")], "packed, compiled"),
    ],
)
def test_the_plan_says_which_forms_run(regions: list[RegionRecord], plan: str) -> None:
    assert plan_of(regions) == plan


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    options = ComputeOptions(models=("alexnet",), setups=("eager", "deepytorch"), batch_size=2, steps=4, settle=60.0)
    found = run_benchmark(Compute(), options, tmp_path / "compute.json")
    assert [row.failed for row in found.rows] == ["", ""]
    assert all(row.figures["step_s"] > 0 and row.figures["process_mb"] > 0 for row in found.rows)
    assert found.rows[1].figures["loss_rel_diff"] < 1e-4


@pytest.mark.slow
def test_what_a_benchmark_has_started_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from deepytorch.cli import main; main()", "bench", "compute"]
    options = [
        "--models",
        "tts_angular",
        "--setups",
        "eager",
        "--steps",
        "1000",
        "--out",
        str(tmp_path / "compute.json"),
    ]
    bench = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (workers := children_of(bench.pid)):
        assert time.monotonic() < deadline, "the benchmark has started nothing"
        time.sleep(0.1)
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    assert [pid for pid in workers if is_running(pid)] == []
