"""`deepytorch bench compute`: steps of models of all kinds, in the ways that people run them and with the import.

Each way has a process of its own, since the import changes how a process keeps memory. The processes take turns, step
by step, once each has compiled what it runs.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepytorch.bench.alternation import alternate
from deepytorch.bench.compute_worker import ComputeJob, ComputeRun
from deepytorch.bench.host_scripts import Script, ScriptFailed
from deepytorch.bench.options import check_arms, check_at_least, check_choice
from deepytorch.bench.results import Record, decoded, machine
from deepytorch.bench.zoo import MODELS
from deepytorch.bench.zoo.workload import SIZES

ARMS = ("eager", "inductor", "max-autotune", "recipe", "deepytorch")
PRECISIONS = ("fp32", "amp")
_LAST = 5  # steps of the warm-up that timed steps are compared with
_DISTURBED = 1.7


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The options of the measurement. batch_size: 0 takes that of each model. warm_up_s: the most until steps count."""

    models: tuple[str, ...] = MODELS
    arms: tuple[str, ...] = ("eager", "inductor", "deepytorch")
    size: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 0
    steps: int = 20
    warm_up_s: float = 300.0
    timeout_s: float = 1200.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run with."""
        check_choice(self, "models", MODELS)
        check_arms(self, ARMS)
        check_choice(self, "size", SIZES)
        check_choice(self, "precision", PRECISIONS)
        check_at_least(self, 0, "batch_size")
        check_at_least(self, 1, "steps", "warm_up_s", "timeout_s")


@dataclass(frozen=True, kw_only=True)
class ComputeArm(Record):
    """One way to run a model.

    Attributes:
        name: The way.
        step_s: The median step, with its optimizer.
        ratio: Its time over deepytorch's, the median over pairs of steps: above 1, deepytorch is faster.
        peak_mb: The most memory of the process, MiB.
        first_s: Until the end of the second step.
        break_even_s: Seconds of training until more steps are done than in eager; None if they never will be. What
            another process compiles meanwhile takes none of these.
        plan: What runs.
        loss_rel_diff: The largest relative difference of the first losses from eager's.
        slowed: The time of a step in turns, over that of the last steps before, when the process had the machine alone.
        failed: Why it could not be measured; empty if it was.
    """

    name: str
    step_s: float = 0.0
    ratio: float = 0.0
    peak_mb: float = 0.0
    first_s: float = 0.0
    break_even_s: float | None = None
    plan: str = ""
    loss_rel_diff: float = 0.0
    slowed: float = 0.0
    failed: str = ""

    @property
    def is_disturbed(self) -> bool:
        """Return whether it took so much longer in turns that something else has taken the machine or its memory."""
        return self.slowed > _DISTURBED


@dataclass(frozen=True, kw_only=True)
class ComputeModel(Record):
    """One model. best_ratio: the time of the better of eager and Inductor over deepytorch's; 0 without these arms."""

    name: str
    arms: list[ComputeArm]
    best_ratio: float


@dataclass(frozen=True, kw_only=True)
class ComputeResult(Record):
    """The result of the measurement, and its options."""

    size: str
    precision: str
    batch_size: int
    steps: int
    models: list[ComputeModel]
    torch_version: str
    machine: str


def run_compute(options: ComputeOptions, notify: Callable[[str], None]) -> Iterator[ComputeResult]:
    """Measure one model after the other, and yield the results so far after each."""
    found: list[ComputeModel] = []
    for name in options.models:
        notify(f"{name}: {', '.join(options.arms)}")
        found.append(_model(name, options))
        yield ComputeResult.of(
            options, models=list(found), torch_version=torch.__version__, machine=f"{machine()}, default threads"
        )


def _model(name: str, options: ComputeOptions) -> ComputeModel:
    with tempfile.TemporaryDirectory(prefix="deepytorch-bench-") as scratch:
        scripts: dict[str, Script] = {}
        failed: dict[str, str] = {}
        try:
            for arm in options.arms:
                folder = Path(scratch, arm)
                folder.mkdir()
                job = ComputeJob(
                    model=name,
                    arm=arm,
                    size=options.size,
                    precision=options.precision,
                    batch_size=options.batch_size,
                    steps=options.steps,
                    warm_up_s=options.warm_up_s,
                )
                scripts[arm] = script = Script(
                    job,
                    folder,
                    1,
                    options.timeout_s * len(options.arms),
                    on=arm == "deepytorch",
                    in_turns=True,
                    worker="deepytorch.bench.compute_worker",
                    threads=None,
                    environment={"DEEPYTORCH_COMPILE": "background"},  # forms are not tried where steps wait
                )
                _step(script, arm, failed)  # one at a time: this step begins when its warm-up is over
            alternate([partial(_step, script, arm, failed) for arm, script in scripts.items() if arm not in failed])
            runs = {arm: run for arm, script in scripts.items() if (run := _result(script, arm, failed)) is not None}
        finally:
            for script in scripts.values():
                script.end()
    return judged(name, options.arms, runs, failed)


def _step(script: Script, arm: str, failed: dict[str, str]) -> bool:
    try:
        return script.step()
    except ScriptFailed as failure:
        failed[arm] = str(failure)
        return False


def _result(script: Script, arm: str, failed: dict[str, str]) -> ComputeRun | None:
    if arm in failed:
        return None
    try:
        [found] = script.result()
    except ScriptFailed as failure:
        failed[arm] = str(failure)
        return None
    return decoded(ComputeRun, found)


def judged(name: str, arms: Sequence[str], runs: dict[str, ComputeRun], failed: dict[str, str]) -> ComputeModel:
    """Return what the runs of a model's arms say. failed: the reasons of arms that have none."""
    ours, eager = runs.get("deepytorch"), runs.get("eager")
    found = []
    for arm in arms:
        run = runs.get(arm)
        if run is None:
            found.append(ComputeArm(name=arm, failed=failed.get(arm, "it ended without a result")))
            continue
        pairs = [] if ours is None else list(zip(run.seconds, ours.seconds, strict=True))
        found.append(
            ComputeArm(
                name=arm,
                step_s=statistics.median(run.seconds),
                ratio=statistics.median(one / other for one, other in pairs) if pairs else 0.0,
                peak_mb=run.peak_mb,
                first_s=run.first_s,
                break_even_s=None if eager is None else break_even(run.warm_up, run.seconds, eager.seconds),
                plan="; ".join([run.plan, *run.fallbacks]),
                loss_rel_diff=0.0 if eager is None else _difference(eager.losses, run.losses),
                slowed=statistics.median(run.seconds) / statistics.median(run.warm_up[-_LAST:]),
            )
        )
    rivals = [each.ratio for each in found if each.name in ("eager", "inductor") and not each.failed]
    return ComputeModel(name=name, arms=found, best_ratio=min(rivals, default=0.0))


def break_even(warm_up: Sequence[float], settled: Sequence[float], eager: Sequence[float]) -> float | None:
    """Return the seconds of training after which more steps are done than in eager; None if that never comes.

    warm_up: seconds of each step until the way to run the model was settled. settled, eager: of steps from then on.
    """
    theirs, ours = statistics.median(eager), statistics.median(settled)
    passed = lost = made_up = 0.0
    for seconds in warm_up:
        was_behind = lost > 0.0
        passed, lost = passed + seconds, lost + seconds - theirs
        if was_behind and lost <= 0.0:
            made_up = passed
    if lost <= 0.0:
        return made_up
    return passed + lost / (theirs - ours) * ours if ours < theirs else None


def _difference(expected: Sequence[float], found: Sequence[float]) -> float:
    largest = max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True)), default=0.0)
    return largest if math.isfinite(largest) else 1e9
