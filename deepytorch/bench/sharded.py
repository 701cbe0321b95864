"""`deepytorch bench sharded`: step times and losses of FSDP2, with values rounded between hosts and exact."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.bench.comm_launch import found_by_ranks
from deepytorch.bench.lab import LabOptions
from deepytorch.bench.results import Record, machine
from deepytorch.bench.sharded_worker import UNTIMED, ShardedOptions

WORKER = (sys.executable, "-m", "deepytorch.bench.sharded_worker")
LAST_LOSSES = 10  # steps over which the loss at the end is averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedArm(Record):
    """The times and losses of one arm.

    Ratios are to the first arm: its step / this one's, this one's loss / its loss.
    """

    what = "arm"

    name: str
    step_seconds: float  # the median over steps of the slowest rank's forward, backward and optimizer
    speedup: float
    last_loss: float  # the mean over the last steps and all ranks
    loss_ratio: float
    losses: list[float]  # of every step, the mean over ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedResult(Record):
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


def run_sharded(options: ShardedOptions, notify: Callable[[str], None] = lambda text: None) -> ShardedResult:
    """Start the ranks in the lab, train, and end the ranks however the training ends.

    Raises `RankError` when a rank fails or all stand still, `ConfigError` if the machine cannot have a lab.
    """
    lab = LabOptions(hosts=options.hosts, ranks=options.ranks, rate=options.rate)
    return _result(options, found_by_ranks(options, options.ranks, lab, WORKER, notify))


def _result(options: ShardedOptions, found: dict[str, Any]) -> ShardedResult:
    seconds = {name: statistics.median(found[name]["seconds"][UNTIMED:]) for name in options.arms}
    losses = {name: statistics.mean(found[name]["losses"][-LAST_LOSSES:]) for name in options.arms}
    first = options.arms[0]
    return ShardedResult.of(
        options,
        data=None if options.data is None else options.data.name,
        ranks=options.ranks * options.hosts,
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
        machine=machine(),
        torch_version=torch.__version__,
    )
