"""The training of one model in one way, as one rank: the work behind most benchmarks."""

from __future__ import annotations

import contextlib
import math
import os
import time
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
from deepytorch.bench.memory import peak_bytes
from deepytorch.bench.parallel import Trainer, loss_of, trainer
from deepytorch.bench.ready_times import measured_ready_times
from deepytorch.bench.rivals import arranged, ordered, with_kernels
from deepytorch.bench.settling import plan_of, settle, wait_for_code
from deepytorch.bench.training_step import to_device
from deepytorch.bench.zoo import build_workload
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.native import native
from deepytorch.comm.group.options import Options
from deepytorch.comm.group.quantized import quantize
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.report import LEDGER
from deepytorch.errors import ConfigError, ParityError
from deepytorch.process_facts import peak_memory
from deepytorch.switch import SWITCH

Job = TrainingJob
Batch = dict[str, Tensor]
_READY_STEPS = 4


def run(job: TrainingJob, turns: Turns) -> dict[str, Any]:
    """Train, and time steps in turns once what runs is chosen; return the seconds of each, and what else was measured.

    Raises `ParityError` if the loss is not finite in the end.
    """
    run = opened(job)
    run.warm_up(turns)
    with Hardware(on=job.hardware and not int(os.environ.get("LOCAL_RANK", "0"))) as hardware:
        for _ in range(job.steps):
            turns.take()
            hardware.resume()
            run.step()
            hardware.pause()
            run.wait_for_code()
            turns.hand_on()
    return run.found() | {
        "peak_mb": peak_bytes(run.train, run.device) / 2**20 if job.memory else 0.0,
        "hardware": hardware.found() if job.hardware else {},
        "ready": _ready(run) if job.ready else {},
    }


def opened(job: TrainingJob) -> Run:
    """Join the process group, unless an earlier job has, and return the model that is to be trained."""
    BUDGET.account(1e9 if job.compiles else -1e9)  # at once, or never: `bench start` measures when it is afforded
    device = _device(job)
    rank = _join(job, device)
    LEDGER.forget()  # of an earlier job's model
    return Run(job, device, rank)


def imports() -> bool:
    """Return whether this process has the import, switched on."""
    return SWITCH.enabled and os.environ.get("DEEPYTORCH") != "off"


class Run:
    """A model, its batches, and steps on one batch after the other.

    rows: examples of an optimizer step of this rank. tokens, positions: of such a step, without pads and with them, the
    mean of the batches. seconds, cpu_seconds: of each step since the warm-up, of which the first has the number
    `first_timed`; CPU time is that of all threads of this process.
    """

    def __init__(self, job: TrainingJob, device: torch.device, rank: int) -> None:
        self.job, self.device, self.rank = job, device, rank
        self._imports = imports()
        self.trainer, batches = _trainer(job, device, rank)
        self._batches = [to_device(batch, device) for batch in arranged(batches, job)]
        steps = len(batches) // job.parallel.accumulate
        self.rows = sum(len(next(iter(batch.values()))) for batch in batches) / steps
        masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
        self.tokens = sum(int(mask.sum()) for mask in masks) / steps
        self.positions = sum(mask.numel() for mask in masks) / steps
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[Tensor] = []
        self.count = self.first_timed = 0
        self._warm_up: list[float] = []
        self._last = torch.zeros(())

    def warm_up(self, turns: Turns) -> None:
        """Train until steps may be timed: those of the job, and until deepytorch has chosen what runs."""
        began = time.perf_counter()
        for number in range(self.job.warm_up):
            turns.say(DOING, f"{self.job.model}, step {number + 1} of the warm-up")
            self.step()
            if number == 1:
                self._first_s = time.perf_counter() - began
        if self._imports and self.job.compiles and self.job.settle_s:
            turns.say(DOING, f"{self.job.model}, until what runs is chosen")
            settle(lambda: self.step(turns), self.job.settle_s)
        self._warm_up, self.seconds, self.cpu_seconds = self.seconds, [], []
        self.first_timed = self.count  # setups settle after other numbers of steps, and are timed on the same batches

    def wait_for_code(self) -> None:
        """Wait while code is compiled, in the turn of the step that asked for it."""
        if self._imports and self.job.compiles:
            wait_for_code(self.job.settle_s)

    def found(self) -> dict[str, Any]:
        """Return what is said of any run. Raises `ParityError` if the loss is not finite."""
        losses = [float(loss) for loss in (*self.losses, self._last)]
        if not all(map(math.isfinite, losses)):
            raise ParityError(f"a loss of {self.job.model} is {losses[-1]} after {self.count} steps, or was not finite")
        regions = LEDGER.report().regions if self._imports else []
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "warm_up": self._warm_up,
            "first_s": self._first_s,
            "losses": losses[:-1],
            "batches": len(self._batches) // self.job.parallel.accumulate,
            "rows": self.rows,
            "tokens": self.tokens,
            "positions": self.positions,
            "process_mb": peak_memory() / 2**20,
            "plan": plan_of(regions) if self._imports else "",
            "fallbacks": [message for each in regions for message in each.fallbacks],
        }

    def step(self, turns: Turns | None = None) -> None:
        """Run as many steps as are timed together."""
        if turns is not None and self.count % 10 == 0:
            turns.say(DOING, f"{self.job.model}, step {self.count}")
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(self.job.together):
            self.train()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append((time.perf_counter() - began) / self.job.together)
        self.cpu_seconds.append((time.process_time() - cpu_began) / self.job.together)

    def train(self) -> None:
        """Run one step, without waiting for a GPU."""
        self.keep(self.trainer.step(self.next_batches()))

    def keep(self, loss: Tensor) -> None:
        """Count a step that had this loss."""
        self._last = loss
        self.count += 1
        if len(self.losses) < min(self.job.losses, self.job.warm_up):  # behind it setups go on with other batches
            self.losses.append(loss)

    def next_batches(self) -> list[Batch]:
        """Return the micro-batches of the next step."""
        return self.batches(self.count - self.first_timed)

    def batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of the step of a number."""
        begin = step * self.job.parallel.accumulate
        return [self._batches[(begin + at) % len(self._batches)] for at in range(self.job.parallel.accumulate)]


def _ready(run: Run) -> dict[str, Any]:
    """Return the compute of steps without communication, between real ones, and the group's topology and links."""
    made: Any = run.trainer
    begin = dist.barrier if dist.is_initialized() else lambda: None

    def forward() -> Tensor:
        with made.autocast():
            return loss_of(made.model(**run.next_batches()[0]))

    steps = []
    for _ in range(_READY_STEPS):
        run.train()
        with made.model.no_sync() if hasattr(made.model, "no_sync") else contextlib.nullcontext():
            found = measured_ready_times(made.model, forward, made.optimizer, begin)
        steps.append(asdict(found))
    group: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # stock groups tell nothing
        known = group_of(dist.group.WORLD) if dist.is_initialized() else None
        group = {} if known is None else {"topology": known.topology.to_json(), "links": known.links.to_json()}
    return {"steps": steps, "group": group}


def _trainer(job: TrainingJob, device: torch.device, rank: int) -> tuple[Trainer, list[Batch]]:
    found: list[Any] = []

    def make() -> nn.Module:
        found.append(build_workload(job.model, job.size, data=job.file))
        model: nn.Module = _without_dropout(found[0].model)
        if job.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return with_kernels(model, job.kernels, job.model)

    made = trainer(make, job.parallel, optimizer=_optimizer_of(job), device=device)
    if job.quantize is not None:
        quantize(made.model, job.quantize)  # type: ignore[arg-type]
    replica, count = job.parallel.replica(rank), job.batches * job.parallel.accumulate
    replicas = job.parallel.replicas(dist.get_world_size() if dist.is_initialized() else 1)
    batches = ordered(found[0], job, replica, replicas, count)
    if job.channels_last:
        batches = [{name: _last(value) for name, value in batch.items()} for batch in batches]
    return made, batches


def _optimizer_of(job: TrainingJob) -> Any:
    if job.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=job.lr or 1e-5, fused=job.fused or None)
    # as in PyTorch's benchmarks
    return partial(torch.optim.SGD, lr=job.lr or 1e-3, momentum=0.9, weight_decay=1e-4, fused=job.fused or None)


def _last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _join(job: TrainingJob, device: torch.device) -> int:
    """Open the process group, as a script does, unless an earlier job has; return this rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not job.parallel.sharding.startswith(("zero", "fsdp")):
        return 0
    if not dist.is_initialized():
        timeout = timedelta(seconds=job.timeout_s)
        SWITCH.process_groups = not job.stock_group
        if imports() and not job.stock_group:
            native.load()  # a group waits for no C++ that is yet to be compiled, but is stock's
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
