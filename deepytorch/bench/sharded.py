"""`deepytorch bench sharded`: step times and losses of FSDP2, with values rounded between hosts and exact."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepytorch.bench.comm_launch import found_by_ranks
from deepytorch.bench.json_results import match_fields, read_json, write_json
from deepytorch.bench.lab import LabOptions
from deepytorch.bench.models import SIZES
from deepytorch.bench.sharded_worker import ARMS, ShardedPlan
from deepytorch.errors import ConfigError

WORKER = (sys.executable, "-m", "deepytorch.bench.sharded_worker")
_UNTIMED = 2  # first steps, which allocate buffers
LAST_LOSSES = 10  # steps over which the loss at the end is averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOptions:
    """The options of `deepytorch bench sharded`. The first of `arms` is the baseline."""

    size: str = "demo"
    batch_size: int = 2
    arms: tuple[str, ...] = ("exact", "int8")
    ranks: int = 2
    hosts: int = 2
    rate: str = "200mbit"
    steps: int = 100
    timeout_s: float = 300.0
    data: Path | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        if self.size not in SIZES:
            raise ConfigError(f"The model size is {self.size!r}, expected one of {', '.join(SIZES)}.")
        if not self.arms or len(set(self.arms)) != len(self.arms) or not set(self.arms) <= set(ARMS):
            found = ", ".join(self.arms) or "empty"
            raise ConfigError(f"arms is {found}; expected one or more of {', '.join(ARMS)}, each once.")
        for name, least in (("batch_size", 1), ("ranks", 1), ("hosts", 2), ("steps", _UNTIMED + 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {least} or more.")

    def plan(self) -> ShardedPlan:
        """Return what every rank measures."""
        return ShardedPlan(
            size=self.size,
            batch_size=self.batch_size,
            arms=self.arms,
            steps=self.steps,
            timeout_s=self.timeout_s,
            data=None if self.data is None else str(self.data.resolve()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedArm:
    """The times and losses of one arm.

    Ratios are to the first arm: its step / this one's, this one's loss / its loss.
    """

    name: str
    step_seconds: float  # the median over steps of the slowest rank's forward, backward and optimizer
    speedup: float
    last_loss: float  # the mean over the last steps and all ranks
    loss_ratio: float
    losses: list[float]  # of every step, the mean over ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedResult:
    """The result of `deepytorch bench sharded`."""

    size: str
    batch_size: int
    data: str | None  # the name of the file
    ranks: int
    hosts: int
    rate: str
    steps: int
    arms: list[ShardedArm]
    machine: str
    torch_version: str

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(content: Any) -> ShardedResult:
        """Return the result that the JSON value `content` holds. Raises `DataError` for another layout."""
        match_fields(content, ShardedResult, "result")
        for arm in content["arms"]:
            match_fields(arm, ShardedArm, "arm")
        return ShardedResult(**content | {"arms": [ShardedArm(**arm) for arm in content["arms"]]})


def read_sharded_result(path: Path) -> ShardedResult:
    """Read a result file. Raises `DataError` when it cannot be read or has another layout."""
    return ShardedResult.from_json(read_json(path))


def write_sharded_result(path: Path, result: ShardedResult) -> None:
    """Write `result` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    write_json(path, result.to_json())


def run_sharded(
    options: ShardedOptions, notify: Callable[[str], None] = lambda text: None, worker: Sequence[str] = WORKER
) -> ShardedResult:
    """Start the ranks in the lab, train, and end the ranks however the training ends.

    Raises `RankError` when a rank fails or all stand still, `ConfigError` if the machine cannot have a lab.
    """
    lab = replace(LabOptions(hosts=options.hosts, ranks=options.ranks), rate=options.rate)
    found = found_by_ranks(options.plan(), options.ranks, lab, worker, notify)
    return _result(options, found)


def _result(options: ShardedOptions, found: dict[str, Any]) -> ShardedResult:
    seconds = {name: statistics.median(found[name]["seconds"][_UNTIMED:]) for name in options.arms}
    losses = {name: statistics.mean(found[name]["losses"][-LAST_LOSSES:]) for name in options.arms}
    first = options.arms[0]
    return ShardedResult(
        size=options.size,
        batch_size=options.batch_size,
        data=None if options.data is None else options.data.name,
        ranks=options.ranks * options.hosts,
        hosts=options.hosts,
        rate=options.rate,
        steps=options.steps,
        arms=[
            ShardedArm(
                name=name,
                step_seconds=seconds[name],
                speedup=seconds[first] / seconds[name],
                last_loss=losses[name],
                loss_ratio=losses[name] / losses[first],
                losses=found[name]["losses"],
            )
            for name in options.arms
        ],
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
        torch_version=torch.__version__,
    )
