"""The program of each rank of `deepytorch bench sharded`: `python -m deepytorch.bench.sharded_worker PLAN.json`.

One process holds the sharded models of every arm; after each step of one arm the next arm takes the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from deepytorch.bench.comm_worker import init_default_group
from deepytorch.bench.models import MAX_POSITIONS, build_model
from deepytorch.bench.rank_process import Seat, run_rank
from deepytorch.bench.training_step import rotated
from deepytorch.comm.group.options import Options
from deepytorch.comm.group.quantized import Wire, quantize
from deepytorch.data import batches, load_rows, train_tokenizer

_VOCAB = 8192
ARMS = ("gloo", "exact", *get_args(Wire))  # stock's group; deepytorch's, by the rounding between hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedPlan:
    """The plan of the measurement: equal on all ranks."""

    size: str
    batch_size: int
    arms: tuple[str, ...]
    steps: int
    timeout_s: float
    data: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)


class Arm:
    """One way of training the same model on the same batches."""

    def __init__(self, name: str, plan: ShardedPlan, model: nn.Module) -> None:
        self.name = name
        timeout = timedelta(seconds=plan.timeout_s)
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


def measure(plan: ShardedPlan, notify: Callable[[str], None]) -> dict[str, Any]:
    """Train in every arm, in turns; return the times and losses of each arm's steps.

    A time is the slowest rank's seconds, a loss the mean of the ranks.
    """
    rows = load_rows(None if plan.data is None else Path(plan.data))
    tokenizer = train_tokenizer(rows)
    arms = [Arm(name, plan, build_model("llama", plan.size, vocab_size=_VOCAB)) for name in plan.arms]
    found: dict[str, dict[str, list[float]]] = {arm.name: {"seconds": [], "losses": []} for arm in arms}
    drawn = batches(
        rows, tokenizer, batch_size=plan.batch_size, max_length=MAX_POSITIONS, seed=dist.get_rank(), steps=plan.steps
    )
    for number, batch in enumerate(drawn):
        notify(f"Training: step {number + 1} of {plan.steps}")
        for arm in rotated(arms, number):
            dist.barrier()
            seconds, loss = arm.step(batch)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(loss)
            found[arm.name]["seconds"].append(float(slowest))
            found[arm.name]["losses"].append(float(loss) / dist.get_world_size())
    return found


def main() -> None:
    """Run the plan of `sys.argv[1]` as one rank."""

    def work(content: dict[str, Any], seat: Seat) -> None:
        plan = ShardedPlan(**content | {"arms": (*content["arms"],)})
        init_default_group(plan.timeout_s, seat.store, seat.rank, seat.ranks)
        seat.tell({"done": measure(plan, lambda text: seat.tell({"doing": text}))})

    run_rank(work)


if __name__ == "__main__":
    main()
