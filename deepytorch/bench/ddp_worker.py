"""What each rank of `deepytorch bench ddp` runs: `python -m deepytorch.bench.ddp_worker PLAN.json`.

One process holds the models of every arm, so that the arms take turns within each round. Compute alone (steps under
`no_sync`) and communication alone (the arm's buckets, one after the other) are measured beside, since they set the
bound of what overlap can reach.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepytorch.bench.arms import rotated
from deepytorch.bench.ddp_models import Workload, build_workload
from deepytorch.bench.rank_process import Seat, run_rank
from deepytorch.comm.gradients import REDUCERS

ARMS = ("ddp", "ddp_compile", "ddp_python_reducer", "deepytorch")
# `torch._dynamo.config.optimize_ddp` of each arm: stock cuts a model into the buckets of DDP, or traces its reducer.
_OPTIMIZE_DDP: dict[str, bool | str] = {
    "ddp": False, "ddp_compile": True, "ddp_python_reducer": "python_reducer", "deepytorch": False,
}  # fmt: skip
_WARM_UP = 3
_BUCKET_BYTES = 25 << 20  # of stock DDP


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpPlan:
    """What is measured: equal on all ranks."""

    model: str
    size: str
    batch_size: int
    precision: str
    arms: tuple[str, ...]
    backend: str
    rounds: int
    steps: int  # of an arm in a round
    timeout_s: float
    lowering: str = "inductor"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts of one step, on one rank."""

    forward: float
    backward: float
    optimizer: float


class Arm:
    """One way of training the same model on the same batches."""

    def __init__(self, name: str, plan: DdpPlan, group: dist.ProcessGroup, workload: Workload) -> None:
        self.name, self.group = name, group
        self._precision = plan.precision
        self._mode = _OPTIMIZE_DDP[name]
        with self._dynamo():
            self.model = DistributedDataParallel(
                workload.model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
            )
            self.call: Callable[..., Any] = self.model
            if name == "deepytorch":
                self.call = torch.compile(self.model, backend="deepytorch", options={"lowering": plan.lowering})
            elif name != "ddp":
                self.call = torch.compile(self.model, backend=plan.lowering)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)

    @contextlib.contextmanager
    def _dynamo(self) -> Iterator[None]:
        compiled_autograd = self._mode == "python_reducer"
        with torch._dynamo.config.patch(optimize_ddp=self._mode, compiled_autograd=compiled_autograd):
            yield

    def step(self, batch: dict[str, Tensor], *, sync: bool = True) -> Times:
        """Train on one batch; without `sync` gradients stay where they are."""
        with self._dynamo(), contextlib.nullcontext() if sync else self.model.no_sync():
            self.optimizer.zero_grad()
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "amp"):
                loss = self.call(**batch)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            if sync:
                self.optimizer.step()
        return Times(forward - begin, backward - forward, time.perf_counter() - backward)

    def bucket_bytes(self) -> list[int]:
        """Bytes of what it sends in a step."""
        for reducer in REDUCERS.values():
            if self.name == "deepytorch" and reducer.parameters[0] is next(self.model.parameters()):
                return [bucket.num_bytes for bucket in reducer.plan.buckets]
        return self._stock_bytes()

    def _stock_bytes(self) -> list[int]:
        total = sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)
        return [min(_BUCKET_BYTES, total - start) for start in range(0, total, _BUCKET_BYTES)]

    def communication_seconds(self) -> float:
        """Seconds of its buckets alone, one after the other, or of stock's on its group where these take less."""
        return min(self._seconds_of(self.bucket_bytes()), self._seconds_of(self._stock_bytes()))

    def _seconds_of(self, sizes: list[int]) -> float:
        buffers = [torch.zeros(-(-size // 4)) for size in sizes]
        dist.barrier()
        begin = time.perf_counter()
        for work in [dist.all_reduce(buffer, group=self.group, async_op=True) for buffer in buffers]:
            work.wait()
        return time.perf_counter() - begin


def measure(plan: DdpPlan, notify: Callable[[str], None]) -> dict[str, Any]:
    """Train in every arm, in turns; return every rank's times, by arm."""
    rank = dist.get_rank()
    stock = dist.group.WORLD
    assert stock is not None
    fast = dist.new_group(backend=plan.backend, timeout=timedelta(seconds=plan.timeout_s))
    arms: list[Arm] = []
    batch: dict[str, Tensor] = {}
    for name in plan.arms:
        notify(f"Compiling: {name}")
        workload = build_workload(plan.model, plan.size)
        batch = workload.batch(plan.batch_size, torch.Generator().manual_seed(rank))
        if plan.precision == "bf16":
            workload.model.to(torch.bfloat16)
            batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
        arm = Arm(name, plan, fast if name == "deepytorch" else stock, workload)
        for _ in range(_WARM_UP):
            arm.step(batch)
        arm.step(batch, sync=False)
        arms.append(arm)
    found: dict[str, dict[str, list[Any]]] = {arm.name: {"steps": [], "alone": [], "communication": []} for arm in arms}
    difference = _difference(arms, batch)
    for turn in range(plan.rounds):
        notify(f"Measuring: round {turn + 1} of {plan.rounds}")
        for arm in rotated(arms, turn):
            for _ in range(plan.steps):
                dist.barrier()
                found[arm.name]["steps"].append(asdict(arm.step(batch)))
            dist.barrier()
            found[arm.name]["alone"].append(asdict(arm.step(batch, sync=False)))
            found[arm.name]["communication"].append(arm.communication_seconds())
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    buckets = {arm.name: arm.bucket_bytes() for arm in arms}
    return {"ranks": everyones, "max_grad_rel_diff": difference, "bucket_bytes": buckets}


def _difference(arms: list[Arm], batch: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative difference of a gradient to the first arm's, all arms from the same weights."""
    weights = {name: value.clone() for name, value in arms[0].model.module.state_dict().items()}
    wanted: list[Tensor] = []
    found = {}
    for arm in arms:
        arm.model.module.load_state_dict(weights)
        arm.step(batch)
        gradients = [each.grad.clone() for each in arm.model.parameters() if each.grad is not None]
        if arm is arms[0]:
            wanted = gradients
        floor = 1e-3 * max(
            float(each.norm()) for each in wanted
        )  # a gradient that is zero but for rounding says nothing
        pairs = zip(gradients, wanted, strict=True)
        found[arm.name] = max(
            float((ours - theirs).norm()) / max(float(theirs.norm()), floor) for ours, theirs in pairs
        )
    return found


def main() -> None:
    """Run the plan of `sys.argv[1]` as one rank."""

    def work(content: dict[str, Any], seat: Seat) -> None:
        plan = DdpPlan(**content | {"arms": (*content["arms"],)})
        timeout = timedelta(seconds=plan.timeout_s)
        dist.init_process_group("gloo", store=seat.store, rank=seat.rank, world_size=seat.ranks, timeout=timeout)
        seat.tell({"done": measure(plan, lambda text: seat.tell({"doing": text}))})

    run_rank(work)


if __name__ == "__main__":
    main()
