"""The training of one model in one way, as one rank: the work behind most benchmarks."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.hardware import Hardware
from deepytorch.bench.jobs import TrainingJob
from deepytorch.bench.parallel import Trainer, loss_of, peak_bytes, trainer
from deepytorch.bench.ready_times import measured_ready_times
from deepytorch.bench.rivals import ordered, with_kernels
from deepytorch.bench.settling import plan_of, settle, wait_for_code
from deepytorch.bench.zoo import build_workload
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.options import Options
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.report import LEDGER
from deepytorch.errors import ConfigError, ParityError
from deepytorch.process_facts import peak_memory
from deepytorch.switch import SWITCH

Job = TrainingJob
Batch = dict[str, Tensor]
_COMPARED = 5  # first steps whose losses are compared
_SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}  # of PyTorch's benchmarks
_ADAMW = {"lr": 1e-5}


def run(job: TrainingJob, turns: Turns) -> dict[str, Any]:
    """Train, and time steps in turns once what runs is chosen; return the seconds of each, and what else was measured.

    Raises `ParityError` if the loss is not finite in the end.
    """
    imports = SWITCH.enabled and os.environ.get("DEEPYTORCH") != "off"
    BUDGET.account(1e9 if job.compiles else -1e9)  # at once, or never: `bench start` measures when it is afforded
    device = _device(job)
    rank = _join(job, device)
    LEDGER.forget()  # of an earlier job's model
    run = _Run(job, device, rank)
    began = time.perf_counter()
    for number in range(job.warm_up):
        turns.say(DOING, f"{job.model}, step {number + 1} of the warm-up")
        run.step()
        if number == 1:
            first_s = time.perf_counter() - began
    if imports and job.compiles and job.settle_s:
        turns.say(DOING, f"{job.model}, until what runs is chosen")
        settle(lambda: run.step(turns), job.settle_s)
    warm_up = run.seconds
    run.seconds = []
    with _sampled(job) as hardware:
        for _ in range(job.steps):
            turns.take()
            run.step()
            if imports and job.compiles:
                wait_for_code(job.settle_s)
            turns.hand_on()
    regions = LEDGER.report().regions if imports else []
    if not math.isfinite(run.last_loss()):
        raise ParityError(f"the loss of {job.model} is {run.last_loss()} after {run.count} steps")
    return {
        "seconds": run.seconds,
        "warm_up": warm_up,
        "first_s": first_s,
        "losses": [float(loss) for loss in run.losses],
        "rows": run.rows,
        "tokens": run.tokens,
        "positions": run.positions,
        "process_mb": peak_memory() / 2**20,
        "peak_mb": peak_bytes(run.train, device) / 2**20 if job.memory else 0.0,
        "plan": plan_of(regions) if imports else "",
        "fallbacks": [message for each in regions for message in each.fallbacks],
        "hardware": hardware,
        "ready": _ready(run) if job.ready else {},
    }


class _Run:
    """A model, its batches, and steps on one batch after the other.

    rows: examples of an optimizer step of this rank. tokens, positions: of such a step, without pads and with them, the
    mean of the batches.
    """

    def __init__(self, job: TrainingJob, device: torch.device, rank: int) -> None:
        self.job, self.device = job, device
        self.trainer, batches = _trainer(job, device, rank)
        self._batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
        steps = len(batches) // job.parallel.accumulate
        self.rows = sum(len(next(iter(batch.values()))) for batch in batches) / steps
        masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
        self.tokens = sum(int(mask.sum()) for mask in masks) / steps
        self.positions = sum(mask.numel() for mask in masks) / steps
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []
        self.count = 0
        self._last = torch.zeros(())

    def step(self, turns: Turns | None = None) -> None:
        """Run as many steps as are timed together."""
        if turns is not None and self.count % 10 == 0:
            turns.say(DOING, f"{self.job.model}, step {self.count}")
        began = time.perf_counter()
        for _ in range(self.job.together):
            self.train()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append((time.perf_counter() - began) / self.job.together)

    def train(self) -> None:
        """Run one step, without waiting for a GPU."""
        self._last = self.trainer.step(self.next_batches())
        self.count += 1
        if len(self.losses) < _COMPARED:
            self.losses.append(self._last)

    def next_batches(self) -> list[Batch]:
        """Return the micro-batches of a step."""
        begin = self.count * self.job.parallel.accumulate
        return [self._batches[(begin + at) % len(self._batches)] for at in range(self.job.parallel.accumulate)]

    def last_loss(self) -> float:
        """Return the loss of the last step."""
        return float(self._last)


def _ready(run: _Run) -> dict[str, Any]:
    """Return the compute of a step without communication, and the process group's topology and links."""
    made: Any = run.trainer
    batch = run.next_batches()[0]

    def forward() -> Tensor:
        with made.autocast():
            return loss_of(made.model(**batch))

    with made.model.no_sync() if hasattr(made.model, "no_sync") else contextlib.nullcontext():
        begin = dist.barrier if dist.is_initialized() else lambda: None
        found: dict[str, Any] = asdict(measured_ready_times(made.model, forward, made.optimizer, begin=begin))
    with contextlib.suppress(ConfigError):  # stock groups tell nothing
        group = group_of(dist.group.WORLD) if dist.is_initialized() else None
        if group is not None:
            found |= {"topology": group.topology.to_json(), "links": group.links.to_json()}
    return found


def _trainer(job: TrainingJob, device: torch.device, rank: int) -> tuple[Trainer, list[Batch]]:
    found: list[Any] = []

    def make() -> nn.Module:
        found.append(build_workload(job.model, job.size, data=job.file))
        model: nn.Module = _without_dropout(found[0].model)
        if job.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return with_kernels(model, job.kernels, job.model)

    kind, settings = (torch.optim.SGD, _SGD) if job.optimizer == "sgd" else (torch.optim.AdamW, _ADAMW)
    fused = {"fused": True} if job.fused else {}
    made = trainer(make, job.parallel, optimizer=partial(kind, **settings, **fused), device=device)
    replica, count = job.parallel.replica(rank), job.batches * job.parallel.accumulate
    replicas = job.parallel.replicas(dist.get_world_size() if dist.is_initialized() else 1)
    batches = ordered(found[0], job, replica, replicas, count)
    if job.channels_last:
        batches = [{name: _last(value) for name, value in batch.items()} for batch in batches]
    return made, batches


def _last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _join(job: TrainingJob, device: torch.device) -> int:
    """Open the process group, as a script does, unless an earlier job has; return this rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not job.parallel.sharding.startswith(("zero", "fsdp")):
        return 0
    if not dist.is_initialized():
        timeout = timedelta(seconds=job.timeout_s)
        if job.compress is not None:
            options = Options(compress=job.compress)  # type: ignore[arg-type]
            dist.init_process_group("deepytorch", timeout=timeout, pg_options=options)
        else:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return dist.get_rank()


def _device(job: TrainingJob) -> torch.device:
    if job.device != "cuda":
        return torch.device(job.device)
    if not torch.cuda.is_available():
        raise ConfigError("The device is cuda, found no GPU that torch can use; expected cpu here.")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextlib.contextmanager
def _sampled(job: TrainingJob) -> Iterator[dict[str, Any]]:
    """Give a dictionary that takes the use of hardware, on the first rank of each host."""
    found: dict[str, Any] = {}
    if not job.hardware or int(os.environ.get("LOCAL_RANK", "0")):
        yield found
        return
    with Hardware() as hardware:
        yield found
    found |= {"seconds": hardware.seconds, **hardware.series}
