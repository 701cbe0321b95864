"""The program of each rank of `deepytorch bench sharded`: `python -m deepytorch.bench.sharded_worker PLAN.json`.

One process holds the sharded models of every arm; after each step of one arm the next arm takes the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from deepytorch.bench.measurement import rotated
from deepytorch.bench.models import MAX_POSITIONS, SIZES, build_model
from deepytorch.bench.options import check_arms, check_at_least, check_choice
from deepytorch.bench.rank_process import run_rank
from deepytorch.comm.group.options import Options
from deepytorch.comm.group.quantized import Wire, quantize
from deepytorch.data import text_batches

UNTIMED = 2  # first steps, which allocate buffers
_VOCAB = 8192
ARMS = ("gloo", "exact", *get_args(Wire))  # stock's group; deepytorch's, by the rounding between hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOptions:
    """The options of `deepytorch bench sharded`, equal on all ranks. The first of `arms` is the baseline."""

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
        check_choice(self, "size", SIZES)
        check_arms(self, ARMS)
        check_at_least(self, 1, "batch_size", "ranks")
        check_at_least(self, 2, "hosts")
        check_at_least(self, UNTIMED + 1, "steps")


class Arm:
    """One way of training the same model on the same batches."""

    def __init__(self, name: str, options: ShardedOptions, model: nn.Module) -> None:
        self.name = name
        timeout = timedelta(seconds=options.timeout_s)
        if name == "gloo":
            group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            group = dist.new_group(backend="deepytorch", timeout=timeout, pg_options=Options())
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in cast(Any, model).model.layers:
            fully_shard(block, mesh=mesh)
        self._model: nn.Module = cast(Any, fully_shard(model, mesh=mesh))
        if name in get_args(Wire):
            quantize(self._model, cast(Wire, name))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        """Train on one batch; return the seconds it took and this rank's loss."""
        begin = time.perf_counter()
        loss = self._model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin, loss.detach()


def measure(options: ShardedOptions, notify: Callable[[str], None]) -> dict[str, Any]:
    """Train in every arm, in turns; return the times and losses of each arm's steps.

    A time is the slowest rank's seconds, a loss the mean of the ranks.
    """
    arms = [Arm(name, options, build_model("llama", options.size, vocab_size=_VOCAB)) for name in options.arms]
    found: dict[str, dict[str, list[float]]] = {arm.name: {"seconds": [], "losses": []} for arm in arms}
    drawn = text_batches(
        options.data,
        batch_size=options.batch_size,
        max_length=MAX_POSITIONS,
        seed=dist.get_rank(),
        steps=options.steps,
    )
    for number, batch in enumerate(drawn):
        notify(f"Training: step {number + 1} of {options.steps}")
        for arm in rotated(arms, number):
            dist.barrier()
            seconds, loss = arm.step(batch)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(loss)
            found[arm.name]["seconds"].append(float(slowest))
            found[arm.name]["losses"].append(float(loss) / dist.get_world_size())
    return found


if __name__ == "__main__":
    run_rank(ShardedOptions, lambda options, tell: measure(options, lambda text: tell(doing=text)))
