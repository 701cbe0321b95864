"""`deepytorch bench ddp`: a data-parallel step in stock DDP and in deepytorch, and the communication that is hidden."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.bench.comm_launch import found_by_ranks
from deepytorch.bench.comm_worker import init_default_group
from deepytorch.bench.ddp_models import MODELS, SIZES
from deepytorch.bench.ddp_worker import ARMS, DdpPlan, measure
from deepytorch.bench.json_results import match_fields, read_json, write_json
from deepytorch.bench.lab import LabOptions
from deepytorch.bench.timeline import Span, plot_steps, write_trace
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError

DEVICES = ("cpu", "cuda")
COMPRESSIONS = ("bf16", "fp16")
PRECISIONS = ("fp32", "amp", "bf16")
BACKENDS = ("deepytorch", "gloo")
PERCENTILES = (50, 75, 90, 95)
WORKER = (sys.executable, "-m", "deepytorch.bench.ddp_worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """The options of `deepytorch bench ddp`.

    backend: the process group of the deepytorch arm, besides gloo's or nccl's. compress: the type that this group casts
    to between hosts. data: the data that llama learns from. timeline: a PNG of one step; a Chrome trace is written next
    to it, with `.json`.
    """

    model: str = "vgg16"
    size: str = "cpu"
    batch_size: int = 8
    precision: str = "fp32"
    arms: tuple[str, ...] = ARMS
    backend: str = "deepytorch"
    ranks: int = 2
    hosts: int = 1
    rate: str | None = None
    flow_rate: str | None = None
    rounds: int = 5
    steps: int = 2
    timeout_s: float = 300.0
    device: str = "cpu"
    compress: str | None = None
    data: Path | None = None
    timeline: Path | None = None
    lowering: str = "inductor"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        _one_of("model", self.model, MODELS)
        _one_of("model size", self.size, SIZES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("device", self.device, DEVICES)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("The device is cuda, found no GPU that torch can use; expected cpu here.")
        if self.compress is not None:
            _one_of("compression", self.compress, COMPRESSIONS)
        if self.data is not None and self.model != "llama":
            raise ConfigError(f"Data was given for {self.model}, which learns from random batches; expected llama.")
        for arm in self.arms:
            _one_of("arm", arm, ARMS)
        if not self.arms or len(set(self.arms)) != len(self.arms):
            found = ", ".join(self.arms) or "empty"
            raise ConfigError(f"arms is {found}; expected one or more of {', '.join(ARMS)}, each once.")
        for name in ("batch_size", "ranks", "hosts", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        if self.hosts == 1 and (self.rate or self.flow_rate):
            raise ConfigError(
                "A rate shapes links between simulated hosts, found one host; expected --hosts 2 or more."
            )

    def lab(self) -> LabOptions | None:
        """Return the simulated hosts, or None for this machine."""
        if self.hosts == 1:
            return None
        shape = LabOptions(hosts=self.hosts, ranks=self.ranks)
        return replace(shape, rate=self.rate or shape.rate, flow_rate=self.flow_rate)

    def plan(self) -> DdpPlan:
        """Return what every rank measures."""
        return DdpPlan(
            model=self.model,
            size=self.size,
            batch_size=self.batch_size,
            precision=self.precision,
            arms=self.arms,
            backend=self.backend,
            rounds=self.rounds,
            steps=self.steps,
            timeout_s=self.timeout_s,
            device=self.device,
            compress=self.compress,
            data=None if self.data is None else str(self.data.resolve()),
            lowering=self.lowering,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpArm:
    """The times of one arm: medians over all ranks and steps, in seconds, unless named otherwise."""

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
class DdpResult:
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

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(content: Any) -> DdpResult:
        """Return the result that the JSON value `content` holds. Raises `DataError` for another layout."""
        match_fields(content, DdpResult, "result")
        for arm in content["arms"]:
            match_fields(arm, DdpArm, "arm")
        return DdpResult(**content | {"arms": [DdpArm(**arm) for arm in content["arms"]]})


def read_ddp_result(path: Path) -> DdpResult:
    """Read a result file. Raises `DataError` when it cannot be read or has another layout."""
    return DdpResult.from_json(read_json(path))


def write_ddp_result(path: Path, result: DdpResult) -> None:
    """Write `result` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    write_json(path, result.to_json())


def run_ddp(
    options: DdpOptions, notify: Callable[[str], None] = lambda text: None, worker: Sequence[str] = WORKER
) -> DdpResult:
    """Start the ranks, measure, and end the ranks however the measurement ends.

    Raises `RankError` when a rank fails or all stand still.
    """
    found = found_by_ranks(options.plan(), options.ranks, options.lab(), worker, notify)
    return _result(options, found)


def run_ddp_in_place(options: DdpOptions, notify: Callable[[str], None] = lambda text: None) -> DdpResult | None:
    """Measure as the rank that torchrun's environment names; return the result on rank 0, None on the others."""
    plan = options.plan()
    if options.device == "cuda":
        local = int(process_environment().get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        plan = replace(plan, device=f"cuda:{local}")
    init_default_group(options.timeout_s)
    try:
        rank = dist.get_rank()
        found = measure(plan, notify if rank == 0 else lambda text: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()
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

    return DdpResult(
        model=options.model,
        size=options.size,
        batch_size=options.batch_size,
        precision=options.precision,
        backend=options.backend,
        compress=options.compress,
        device=options.device,
        data=None if options.data is None else options.data.name,
        ranks=options.ranks * options.hosts,
        hosts=options.hosts,
        rate=options.rate,
        flow_rate=options.flow_rate,
        rounds=options.rounds,
        steps=options.steps,
        arms=arms,
        ratio_vs_ddp=ratio("ddp"),
        ratio_vs_ddp_compile=ratio("ddp_compile"),
        ratio_vs_python_reducer=ratio("ddp_python_reducer"),
        max_grad_rel_diff=max(arm.max_grad_rel_diff for arm in arms),
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
        torch_version=torch.__version__,
    )


def _arm(name: str, found: Mapping[str, Any], batch_size: int) -> DdpArm:
    ranks = [rank[name] for rank in found["ranks"]]
    steps = [step["forward"] + step["backward"] for rank in ranks for step in rank["steps"]]
    alone = [step for rank in ranks for step in rank["alone"]]
    forward = statistics.median(step["forward"] for step in alone)
    backward = statistics.median(step["backward"] for step in alone)
    communication = statistics.median(seconds for rank in ranks for seconds in rank["communication"])
    cuts = statistics.quantiles(steps, n=100, method="inclusive") if len(steps) > 1 else steps * 99
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


def _one_of(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"The {name} is {value!r}, expected one of {', '.join(accepted)}.")
