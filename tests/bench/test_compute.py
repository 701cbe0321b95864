"""`deepytorch bench compute`: what it refuses, what it makes of measured steps, and one small run of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from deepytorch.bench.compute import ComputeOptions, ComputeResult, break_even, judged, run_compute
from deepytorch.bench.compute_worker import ComputeRun, plan_of
from deepytorch.bench.results import decoded
from deepytorch.compiler.report import RegionRecord
from deepytorch.errors import ConfigError
from tests.processes import children_of, is_running


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ("vgg17",)}, "expected one of alexnet"),
        ({"models": ()}, "models is empty"),
        ({"arms": ("eager", "jax")}, "expected one of eager, inductor"),
        ({"arms": ("eager", "eager")}, "each once"),
        ({"precision": "fp8"}, "expected one of fp32, amp"),
        ({"size": "huge"}, "expected one of cpu, full"),
        ({"steps": 0}, "expected 1 or more"),
        ({"batch_size": -1}, "expected 0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ComputeOptions(**changes)


def measured(*seconds: float, losses: tuple[float, ...] = (2.0, 1.0)) -> ComputeRun:
    return ComputeRun(
        seconds=list(seconds), losses=list(losses), first_s=3.0, warm_up=[2.0, 1.0], peak_mb=100.0, plan="compiled"
    )


def test_the_better_of_eager_and_inductor_is_what_counts() -> None:
    runs = {
        "eager": measured(2.0, 2.0, 9.0),
        "inductor": measured(1.5, 1.5, 1.5, losses=(2.0, 1.1)),
        "recipe": measured(0.5, 0.5, 0.5),
        "deepytorch": measured(1.0, 1.0, 1.0),
    }
    found = judged("vgg16", tuple(runs), runs, {})
    assert [arm.ratio for arm in found.arms] == [2.0, 1.5, 0.5, 1.0]
    assert found.best_ratio == 1.5
    assert found.arms[1].loss_rel_diff == pytest.approx(0.1)


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


def test_an_arm_that_was_faster_alone_is_disturbed() -> None:
    runs = {"eager": measured(9.0, 3.0, 3.0), "deepytorch": measured(1.0, 1.0, 1.0)}
    eager, ours = judged("vgg16", tuple(runs), runs, {}).arms
    assert (eager.slowed, eager.is_disturbed) == (2.0, True)  # a step took 1.5 s in the median before
    assert not ours.is_disturbed


def test_an_arm_that_fails_has_its_reason() -> None:
    runs = {"eager": measured(2.0), "deepytorch": measured(1.0)}
    found = judged("sd_unet", ("eager", "inductor", "deepytorch"), runs, {"inductor": "no end after 3 s"})
    assert [arm.failed for arm in found.arms] == ["", "no end after 3 s", ""]
    assert found.best_ratio == 2.0


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
def test_a_small_run() -> None:
    options = ComputeOptions(models=("alexnet",), arms=("eager", "deepytorch"), batch_size=2, steps=4, warm_up_s=8.0)
    [result] = run_compute(options, lambda text: None)
    assert decoded(ComputeResult, result.to_json()) == result
    [model] = result.models
    assert [arm.failed for arm in model.arms] == ["", ""]
    assert all(arm.step_s > 0 and arm.peak_mb > 0 for arm in model.arms)
    assert model.arms[1].loss_rel_diff < 1e-4


@pytest.mark.slow
def test_what_a_benchmark_has_started_ends_with_it() -> None:
    command = [sys.executable, "-c", "from deepytorch.cli import main; main()", "bench", "compute"]
    options = ["--model", "tts_angular", "--arms", "eager", "--steps", "1000"]
    bench = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (workers := children_of(bench.pid)):
        assert time.monotonic() < deadline, "the benchmark has started nothing"
        time.sleep(0.1)
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    assert [pid for pid in workers if is_running(pid)] == []
