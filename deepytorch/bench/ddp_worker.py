"""The program of each rank of `deepytorch bench ddp`: `python -m deepytorch.bench.ddp_worker PLAN.json`.

One process holds the models of every arm, so that the arms take turns within each round. Compute alone (steps under
`no_sync`) and communication alone (the arm's buckets, one after the other) are measured in addition, since they bound
what overlap can reach.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepytorch.bench.measurement import rotated
from deepytorch.bench.options import check_arms, check_at_least, check_choice, check_rates
from deepytorch.bench.rank_process import run_rank
from deepytorch.bench.timeline import Span
from deepytorch.bench.zoo import MODELS, SIZES, build_workload
from deepytorch.bench.zoo.workload import Workload
from deepytorch.comm.gradients.reducer import REDUCERS, GradientReducer
from deepytorch.comm.group.options import Options
from deepytorch.compiler.report import LEDGER
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import dynamo_config, inductor_config

ARMS = ("ddp", "ddp_compile", "ddp_python_reducer", "deepytorch")
DEVICES = ("cpu", "cuda")
COMPRESSIONS = ("bf16", "fp16")
PRECISIONS = ("fp32", "amp", "bf16")
BACKENDS = ("deepytorch", "gloo")
# `torch._dynamo.config.optimize_ddp` of each arm: stock splits a model by DDP's buckets, or traces its reducer.
_OPTIMIZE_DDP: dict[str, bool | str] = {
    "ddp": False, "ddp_compile": True, "ddp_python_reducer": "python_reducer", "deepytorch": False,
}  # fmt: skip
# Settings that overlap and bucket collectives in stock's graphs; `reorder_for_compute_comm_overlap` alone does nothing.
# Torch can measure compute times on GPUs only, so a formula estimates them, on GPUs and CPUs alike.
_OVERLAP = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
}
_WARM_UP = 4  # deepytorch profiles three
_MOST_TRIALS = 150  # steps, of all forms together
_BUCKET_BYTES = 25 << 20  # of stock DDP


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """The options of `deepytorch bench ddp`, equal on all ranks.

    backend: the process group of the deepytorch arm, besides gloo's or nccl's. compress: the type that this group casts
    to between hosts. data: the data that llama learns from. steps: of an arm in a round, each on another batch.
    timeline: a PNG of one step; a Chrome trace is written next to it, with `.json`.
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
        choices = {"model": MODELS, "size": SIZES, "precision": PRECISIONS, "backend": BACKENDS, "device": DEVICES}
        for name, accepted in choices.items():
            check_choice(self, name, accepted)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("The device is cuda, found no GPU that torch can use; expected cpu here.")
        if self.compress is not None:
            check_choice(self, "compress", COMPRESSIONS)
        if self.data is not None and self.model != "llama":
            raise ConfigError(f"Data was given for {self.model}, which learns from random batches; expected llama.")
        check_arms(self, ARMS)
        check_at_least(self, 1, "batch_size", "ranks", "hosts", "rounds", "steps")
        check_rates(self)


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of the parts of one step, on one rank."""

    forward: float
    backward: float
    optimizer: float


class Arm:
    """One way of training the same model on the same batches."""

    def __init__(self, name: str, options: DdpOptions, group: dist.ProcessGroup, workload: Workload) -> None:
        self.name, self.group = name, group
        self._precision, self._mode = options.precision, _OPTIMIZE_DDP[name]
        self.device = next(workload.model.parameters()).device
        with self._dynamo():
            self.model = DistributedDataParallel(
                workload.model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
            )
            self.call: Callable[..., Any] = self.model
            if name == "deepytorch":
                self.call = torch.compile(self.model, backend="deepytorch", options={"lowering": options.lowering})
            elif name != "ddp":
                self.call = torch.compile(self.model, backend=options.lowering)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
        self.last: tuple[float, Times] = 0.0, Times(0.0, 0.0, 0.0)  # the start and the times of the last step

    @contextlib.contextmanager
    def _dynamo(self) -> Iterator[None]:
        compiled_autograd = self._mode == "python_reducer"
        known = inductor_config.get_config_copy() if self.name.startswith("ddp_") else {}
        overlap = {name: value for name, value in _OVERLAP.items() if name in known}
        with (
            dynamo_config.patch(optimize_ddp=self._mode, compiled_autograd=compiled_autograd),
            inductor_config.patch(overlap),
        ):
            yield

    def step(self, batch: dict[str, Tensor], *, sync: bool = True) -> Times:
        """Train on one batch; without `sync` gradients stay on their rank."""
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "amp")
        with self._dynamo(), contextlib.nullcontext() if sync else self.model.no_sync():
            self.optimizer.zero_grad()
            begin = self._now()
            with autocast:
                loss = self.call(**batch)
            forward = self._now()
            loss.backward()
            backward = self._now()
            if sync:
                self.optimizer.step()
            times = Times(forward - begin, backward - forward, self._now() - backward)
        self.last = begin, times
        return times

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reducer(self) -> GradientReducer | None:
        """Return the reducer of this arm's gradients, if it is deepytorch's."""
        first = next(self.model.parameters())
        return next((each for each in REDUCERS.values() if each.parameters[0] is first), None)

    def bucket_bytes(self) -> list[int]:
        """Return the bytes of each bucket that the arm sends in a step."""
        reducer = self.reducer()
        if reducer is not None:
            return [transfer.num_bytes for transfer in reducer.counts.transfers]
        return self._stock_bytes()

    def _stock_bytes(self) -> list[int]:
        total = sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)
        return [min(_BUCKET_BYTES, total - start) for start in range(0, total, _BUCKET_BYTES)]

    def communication_seconds(self) -> float:
        """Return the seconds of the arm's buckets alone, one after the other.

        If stock's buckets take less on the arm's group, their time counts.
        """
        return min(self._seconds_of(self.bucket_bytes()), self._seconds_of(self._stock_bytes()))

    def _seconds_of(self, sizes: list[int]) -> float:
        buffers = [torch.zeros(-(-size // 4), device=self.device) for size in sizes]
        dist.barrier()
        begin = self._now()
        for work in [dist.all_reduce(buffer, group=self.group, async_op=True) for buffer in buffers]:
            work.wait()
        return self._now() - begin

    def spans(self) -> list[Span]:
        """Return the last step as spans of time, from its beginning."""
        begin, times = self.last
        ends = (times.forward, times.forward + times.backward)
        found = [Span("compute", "forward", 0.0, ends[0]), Span("compute", "backward", *ends)]
        found.append(Span("compute", "optimizer", ends[1], ends[1] + times.optimizer))
        reducer = self.reducer()
        for transfer in reducer.counts.transfers if reducer is not None else ():
            size = f"{transfer.num_bytes / 2**20:.2g} MB"
            name = f"rows, {size}" if transfer.as_rows else f"bucket {transfer.bucket}, {size}"
            found.append(Span("communication", name, transfer.started - begin, transfer.ended - begin))
            if transfer.waited > 1e-5:
                waits = transfer.wait_began - begin
                found.append(Span("waiting", name, waits, waits + transfer.waited))
        return found


def measure(options: DdpOptions, notify: Callable[[str], None]) -> dict[str, Any]:
    """Train in every arm, in turns; return every rank's times, by arm."""
    rank = dist.get_rank()
    groups = {name: _group(name, options) for name in options.arms}
    arms: list[Arm] = []
    batches: list[dict[str, Tensor]] = []
    for name in options.arms:
        notify(f"Compiling: {name}")
        workload = build_workload(options.model, options.size, data=options.data)
        batches = [
            _on(options, batch) for batch in workload.batches(options.batch_size, rank, max(_WARM_UP, options.steps))
        ]
        workload.model.to(options.device, torch.bfloat16 if options.precision == "bf16" else None)
        arm = Arm(name, options, groups[name], workload)
        for batch in batches:
            arm.step(batch)
        for batch in batches:
            arm.step(batch, sync=False)
        _settle(arm, batches)
        arms.append(arm)
    found: dict[str, dict[str, list[Any]]] = {arm.name: {"steps": [], "alone": [], "communication": []} for arm in arms}
    difference = _difference(arms, batches[0])
    for turn in range(options.rounds):
        notify(f"Measuring: round {turn + 1} of {options.rounds}")
        for arm in rotated(arms, turn):
            for batch in batches[: options.steps]:
                dist.barrier()
                found[arm.name]["steps"].append(asdict(arm.step(batch)))
            for batch in batches[: options.steps]:
                dist.barrier()
                found[arm.name]["alone"].append(asdict(arm.step(batch, sync=False)))
            found[arm.name]["communication"].append(arm.communication_seconds())
    spans = {}
    for arm in arms:
        dist.barrier()
        arm.step(batches[0])
        spans[arm.name] = [asdict(span) for span in arm.spans()]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    buckets = {arm.name: arm.bucket_bytes() for arm in arms}
    return {"ranks": everyones, "max_grad_rel_diff": difference, "bucket_bytes": buckets, "spans": spans}


def _settle(arm: Arm, batches: list[dict[str, Tensor]]) -> None:
    """Train until the form that a model runs in is chosen: these steps are no steps of a settled run."""
    for step in range(_MOST_TRIALS):
        untried = torch.tensor(sum(each.forms_untried for each in LEDGER.report().regions))
        dist.all_reduce(untried)  # all ranks make as many steps
        if not untried:
            break
        arm.step(batches[step % len(batches)])


def _group(name: str, options: DdpOptions) -> dist.ProcessGroup:
    timeout = timedelta(seconds=options.timeout_s)
    if name == "deepytorch" and options.backend == "deepytorch":
        compressed = Options(compress=options.compress)  # type: ignore[arg-type]
        return dist.new_group(backend="deepytorch", timeout=timeout, pg_options=compressed)
    return dist.new_group(backend="nccl" if options.device == "cuda" else "gloo", timeout=timeout)


def _on(options: DdpOptions, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    halves = {torch.float32: torch.bfloat16} if options.precision == "bf16" else {}
    return {name: value.to(options.device, halves.get(value.dtype)) for name, value in batch.items()}


def _difference(arms: list[Arm], batch: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest relative difference of a gradient to the first arm's, with all arms at the same weights."""
    weights = {name: value.clone() for name, value in arms[0].model.module.state_dict().items()}
    wanted: list[Tensor] = []
    found = {}
    for arm in arms:
        arm.model.module.load_state_dict(weights)
        arm.step(batch)
        gradients = [each.grad.clone() for each in arm.model.parameters() if each.grad is not None]
        if arm is arms[0]:
            wanted = gradients
        # a gradient that is zero except for rounding has no meaningful difference
        floor = 1e-3 * max(float(each.norm()) for each in wanted)
        pairs = zip(gradients, wanted, strict=True)
        found[arm.name] = max(
            float((ours - theirs).norm()) / max(float(theirs.norm()), floor)
            if bool(ours.any()) == bool(theirs.any())
            else 1.0
            for ours, theirs in pairs
        )
    return found


if __name__ == "__main__":
    run_rank(DdpOptions, lambda options, tell: measure(options, lambda text: tell(doing=text)))
