"""`deepytorch bench ddp`: a data-parallel step in stock DDP and in deepytorch, and the communication that is hidden."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.bench.comm_launch import found_by_ranks
from deepytorch.bench.ddp_worker import DdpOptions, measure
from deepytorch.bench.measurement import quantiles
from deepytorch.bench.options import simulated_hosts
from deepytorch.bench.rank_process import torchrun_rank
from deepytorch.bench.results import Record, machine
from deepytorch.bench.timeline import Span, plot_steps, write_trace
from deepytorch.config import process_environment

PERCENTILES = (50, 75, 90, 95)
WORKER = (sys.executable, "-m", "deepytorch.bench.ddp_worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpArm(Record):
    """The times of one arm: medians over all ranks and steps, in seconds, unless named otherwise."""

    what = "arm"

    name: str
    percentile_seconds: dict[str, float]  # of forward and backward, pooled over the ranks
    examples_per_second: dict[str, float]  # of one rank
    forward_seconds: float  # alone, without communication
    backward_seconds: float  # likewise
    optimizer_seconds: float
    comm_seconds: float  # its buckets alone
    exposed_comm_seconds: float  # the time of a step beyond that of compute alone
    overlap_efficiency: float  # (forward + max(backward, communication)) / step: 1 is the best that overlap can reach
    max_grad_rel_diff: float  # to the first arm
    bucket_bytes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpResult(Record):
    """The result of `deepytorch bench ddp`. Ratios are the other arm's step / deepytorch's: above 1 is faster."""

    model: str
    size: str
    batch_size: int
    precision: str
    backend: str
    compress: str | None
    device: str
    data: str | None  # the name of the file
    ranks: int
    hosts: int
    rate: str | None
    flow_rate: str | None
    rounds: int
    steps: int
    arms: list[DdpArm]
    ratio_vs_ddp: float | None
    ratio_vs_ddp_compile: float | None
    ratio_vs_python_reducer: float | None
    max_grad_rel_diff: float
    machine: str
    torch_version: str


def run_ddp(options: DdpOptions, notify: Callable[[str], None] = lambda text: None) -> DdpResult:
    """Start the ranks, measure, and end the ranks however the measurement ends.

    Raises `RankError` when a rank fails or all stand still.
    """
    return _result(options, found_by_ranks(options, options.ranks, simulated_hosts(options), WORKER, notify))


def run_ddp_in_place(options: DdpOptions, notify: Callable[[str], None] = lambda text: None) -> DdpResult | None:
    """Measure as the rank that torchrun's environment names; return the result on rank 0, None on the others."""
    if options.device == "cuda":
        torch.cuda.set_device(int(process_environment().get("LOCAL_RANK", "0")))
    with torchrun_rank(options.timeout_s) as rank:
        found = measure(options, notify if rank == 0 else lambda text: None)
    return _result(options, found) if rank == 0 else None


def _result(options: DdpOptions, found: Mapping[str, Any]) -> DdpResult:
    if options.timeline is not None:
        drawn = {name: [Span(**span) for span in found["spans"][name]] for name in options.arms}
        plot_steps(options.timeline, f"{options.model}, batch {options.batch_size}: one step of rank 0", drawn)
        write_trace(options.timeline.with_suffix(".json"), drawn)
    arms = [_arm(name, found, options.batch_size) for name in options.arms]
    steps = {arm.name: arm.percentile_seconds["p50"] for arm in arms}

    def ratio(name: str) -> float | None:
        return steps[name] / steps["deepytorch"] if name in steps and "deepytorch" in steps else None

    return DdpResult.of(
        options,
        data=None if options.data is None else options.data.name,
        ranks=options.ranks * options.hosts,
        arms=arms,
        ratio_vs_ddp=ratio("ddp"),
        ratio_vs_ddp_compile=ratio("ddp_compile"),
        ratio_vs_python_reducer=ratio("ddp_python_reducer"),
        max_grad_rel_diff=max(arm.max_grad_rel_diff for arm in arms),
        machine=machine(),
        torch_version=torch.__version__,
    )


def _arm(name: str, found: Mapping[str, Any], batch_size: int) -> DdpArm:
    ranks = [rank[name] for rank in found["ranks"]]
    steps = [step["forward"] + step["backward"] for rank in ranks for step in rank["steps"]]
    alone = [step for rank in ranks for step in rank["alone"]]
    forward = statistics.median(step["forward"] for step in alone)
    backward = statistics.median(step["backward"] for step in alone)
    communication = statistics.median(seconds for rank in ranks for seconds in rank["communication"])
    cuts = quantiles(steps, 100)
    percentiles = {f"p{part}": cuts[part - 1] for part in PERCENTILES}
    step = percentiles["p50"]
    return DdpArm(
        name=name,
        percentile_seconds=percentiles,
        examples_per_second={key: batch_size / seconds for key, seconds in percentiles.items()},
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=statistics.median(step["optimizer"] for rank in ranks for step in rank["steps"]),
        comm_seconds=communication,
        exposed_comm_seconds=max(0.0, step - forward - backward),
        overlap_efficiency=(forward + max(backward, communication)) / step,
        max_grad_rel_diff=found["max_grad_rel_diff"][name],
        bucket_bytes=found["bucket_bytes"][name],
    )


def line_of(arm: DdpArm, ranks: int, per_host: int) -> str:
    """Return an arm in the line format of PyTorch's DDP benchmark: seconds, and examples of a rank per second."""
    rates = arm.examples_per_second
    parts = [f"{name}: {seconds:7.3f}s {rates[name]:7.0f}/s" for name, seconds in arm.percentile_seconds.items()]
    return f"{arm.name:>18} {ranks} ranks -- {ranks // per_host}M/{per_host}R:  " + "  ".join(parts)
