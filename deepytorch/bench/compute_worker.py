"""The process of one arm of `deepytorch bench compute`: trains a model in one way, and takes turns with the others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepytorch  # noqa: F401, the arm
from deepytorch import background
from deepytorch.bench.alternation import Turn
from deepytorch.bench.results import decoded
from deepytorch.bench.zoo import build_workload
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.process_facts import peak_memory

_MORE = 3.0  # times the warm-up, until code that is being compiled has to be there
_CALM = 12  # steps in a row in which nothing was compiled or tried: deepytorch's choice is made
_REST_S = 0.3  # between steps while code is compiled, so that this process leaves the cores to the compile process
_BATCHES = 4  # that a run goes through again and again
_COMPARED = 5  # first steps whose losses are compared


@dataclass(frozen=True, kw_only=True)
class ComputeJob:
    """One arm of one model. warm_up_s: the most seconds until steps are timed."""

    model: str
    arm: str
    size: str
    precision: str
    batch_size: int
    steps: int
    warm_up_s: float


@dataclass(frozen=True, kw_only=True)
class ComputeRun:
    """The measurements of one process.

    Attributes:
        seconds: Of each timed step.
        losses: Of the first steps.
        first_s: Until the end of the second step, which compiles in most arms.
        warm_up: Seconds of each step before these.
        peak_mb: The most memory that the process has had, MiB.
        plan: What runs, in words.
    """

    seconds: list[float]
    losses: list[float]
    first_s: float
    warm_up: list[float]
    peak_mb: float
    plan: str
    fallbacks: list[str] = field(default_factory=list)


def run(job: ComputeJob, turn: Turn | None) -> ComputeRun:
    """Train, and time steps in turns once the arm's code is there."""
    workload = build_workload(job.model, job.size)
    batches = workload.batches(job.batch_size or workload.rows, 0, _BATCHES)
    model = _without_dropout(workload.model)
    call, options = _in_arm(job.arm, model)
    if job.arm == "recipe":
        batches = [{name: _last(value) for name, value in batch.items()} for batch in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, **options)
    count = 0

    def step() -> float:
        nonlocal count
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "amp"):
            loss = call(**batches[count % _BATCHES])
        loss.backward()
        optimizer.step()
        count += 1
        if len(losses) < _COMPARED:
            losses.append(float(loss.detach()))
        return time.perf_counter() - begin

    losses: list[float] = []
    began = time.perf_counter()
    warm_up = [step(), step()]
    first_s = time.perf_counter() - began
    calm, state = 0, ""
    while calm < _CALM and time.perf_counter() - began < job.warm_up_s * (_MORE if _waits_for_code(job.arm) else 1.0):
        warm_up.append(step())
        if _waits_for_code(job.arm):
            time.sleep(_REST_S)
        before, state = state, _state() if job.arm == "deepytorch" else "compiled"
        calm = calm + 1 if state == before and state else 0
    if _waits_for_code(job.arm):
        raise TimeoutError(
            f"code was still being compiled after {time.perf_counter() - began:.0f} s, which would slow down the steps "
            "of all setups; expected it to be there: give --warm-up more"
        )
    seconds: list[float] = []
    for _ in range(job.steps):
        if turn is not None:
            turn.take()
        seconds.append(step())
        deadline = time.perf_counter() + job.warm_up_s
        while _waits_for_code(job.arm) and time.perf_counter() < deadline:  # of sizes that this step was the first with
            time.sleep(_REST_S)
        if turn is not None:
            turn.hand_on()
    regions = LEDGER.report().regions if job.arm == "deepytorch" else []
    return ComputeRun(
        seconds=seconds,
        losses=losses,
        first_s=first_s,
        warm_up=warm_up,
        peak_mb=peak_memory() / 2**20,
        plan=plan_of(regions) if job.arm == "deepytorch" else job.arm,
        fallbacks=[message for each in regions for message in each.fallbacks],
    )


def _in_arm(arm: str, model: nn.Module) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Return what runs a step of the arm, and the optimizer's options."""
    if arm == "deepytorch":
        BUDGET.account(1e9)  # steps are timed once all is compiled: when is `bench start`'s to say
        return model, {}
    if arm == "eager":
        return model, {}
    if arm == "recipe":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return torch.compile(model), {"fused": True}
    return torch.compile(model, mode="max-autotune-no-cudagraphs" if arm == "max-autotune" else None), {}


def _last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _state() -> str:
    """Return what deepytorch has decided so far; empty while something is being compiled or tried."""
    regions = LEDGER.report().regions
    meanwhile = sum(each.steps_meanwhile for each in regions)
    if not regions or any(each.forms_untried for each in regions):
        return ""
    return f"{len(regions)} {meanwhile} {[(each.trials, each.compiled_by) for each in regions]}"


def _waits_for_code(arm: str) -> bool:
    """Return whether code is being compiled in the background, and nothing is timed meanwhile."""
    if arm == "deepytorch" and background.is_working():
        return True
    regions = LEDGER.report().regions if arm == "deepytorch" else []
    return any(each.forms_untried for each in regions) and not any(each.on_trial for each in regions)


def plan_of(regions: list[RegionRecord]) -> str:
    """Return in words what runs: of each region the form that was chosen, each said once."""
    found = []
    for each in regions:
        won = [trial.partition(":")[0] for trial in each.trials if trial.endswith("used from now on")]
        if each.steps_packed:
            found.append("packed")
        elif each.trials:
            found.append(won[-1] if won else "eager")
        elif each.compiled_by or each.compiles:
            found.append("compiled")
    return ", ".join(dict.fromkeys(found)) or "eager"


def main() -> None:
    """Run the job in the file `sys.argv[1]`; write `rank0.json` next to it."""
    path, pipes = Path(sys.argv[1]), [int(each) for each in sys.argv[2:4]]
    job = decoded(ComputeJob, json.loads(path.read_text(encoding="utf-8")))
    turn = Turn(*pipes) if pipes else None
    found = run(job, turn)
    if turn is not None:
        turn.close()
    (path.parent / "rank0.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
