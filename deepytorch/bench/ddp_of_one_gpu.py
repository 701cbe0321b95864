"""A packed step under DistributedDataParallel, with several ranks on one device: do they train as one process would?

Each rank trains a small Llama by the import, on batches of its own. By itself it trains the same model in eager on the
batches of all ranks, whose gradients it averages: in float32, and in the step's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepytorch
from deepytorch.bench.benchmark import Place, Setup
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.launch import WORKER, Ranks, scratch
from deepytorch.bench.models import build_model
from deepytorch.bench.training_step import DTYPES, Batch, Precision, to_device
from deepytorch.comm.group.native import native
from deepytorch.compiler.budget import BUDGET
from deepytorch.data import text_batches
from deepytorch.switch import SWITCH

_STEPS, _LR = 4, 0.05


@dataclass(frozen=True, slots=True)
class DdpPlan:
    """The device, the backend of the process group (gloo, nccl, deepytorch), and the dtype of the forward.

    timeout_s: ranks without a message for this long are ended; the first compile is included.
    """

    device: str = "cuda"
    backend: str = "gloo"
    dtype: str = "fp32"
    timeout_s: float = 180.0


Job = DdpPlan


@dataclass(frozen=True, slots=True)
class DdpFound:
    """The counts of steps of all ranks, and how far they were from what eager computes in float32.

    off, eager_off, norm: of the losses and of the change of the weights, those of the rank that is furthest off.
    """

    packed: int
    padded: int
    off: tuple[float, ...]
    eager_off: tuple[float, ...]
    norm: tuple[float, ...]


NAMES = ("losses", "change of the weights")


def run_ddp(plan: DdpPlan, ranks: int = 2, worker: Sequence[str] = WORKER) -> DdpFound:
    """Start `ranks` processes on one device and train. Raises `RankError` if one fails or hangs; no process is left."""
    setup = Setup(name=f"{ranks} ranks", job=plan, imports=True, environment={"DEEPYTORCH_COMPILE": "wait"})
    with scratch() as folder:
        processes = Ranks(setup, Place(ranks=ranks, threads=None), folder, plan.timeout_s, command=worker)
        try:
            processes.give("ddp_of_one_gpu", asdict(plan), lambda text: None)
            found = processes.found()
        finally:
            processes.end()
    furthest = max(found, key=lambda each: sum(each["off"]))
    packed, padded = (sum(int(each[name]) for each in found) for name in ("packed", "padded"))
    return DdpFound(packed, padded, *(tuple(furthest[name]) for name in ("off", "eager_off", "norm")))


def run(plan: DdpPlan, turns: Turns) -> dict[str, Any]:
    """Train as one rank; return what `DdpFound` is made of."""
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    BUDGET.account(1e9)  # compile at once
    if plan.backend == "deepytorch":
        turns.say(DOING, "compiling the group's C++")
        native.load()
    SWITCH.process_groups = False  # a group is what its name says
    turns.say(DOING, "joining")
    dist.init_process_group(plan.backend, timeout=timedelta(seconds=plan.timeout_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start: nn.Module = build_model("llama", "tiny", vocab_size=512, seed=0)
    drawn = text_batches(None, 512, batch_size=4, max_length=128, kind="causal", steps=_STEPS * ranks)
    data = [to_device(batch, device) for batch in drawn]
    steps = [data[begin : begin + ranks] for begin in range(0, len(data), ranks)]
    with deepytorch.paused():
        turns.say(DOING, "training alone")
        exact = _alone(copy.deepcopy(start).to(device), steps, rank, Precision(device))
        eager = _alone(copy.deepcopy(start).to(device), steps, rank, Precision(device, DTYPES[plan.dtype]))
    turns.say(DOING, "training together")
    model = start.to(device)
    where = [device.index or 0] if device.type == "cuda" else None
    together = nn.parallel.DistributedDataParallel(model, device_ids=where)
    precision = Precision(device, DTYPES[plan.dtype])
    ours = _trained(model, lambda step: _loss(together, step[rank], precision), steps)
    dist.barrier()  # no rank leaves while another one still reduces
    counts = deepytorch.report().to_json()
    return {
        "packed": counts["steps_packed"],
        "padded": counts["steps_padded"],
        "off": _distances(ours, exact),
        "eager_off": _distances(eager, exact),
        "norm": [float(wanted.double().norm()) for wanted in exact],
    }


def _distances(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    return [float((one.double() - other.double()).norm()) for one, other in zip(found, wanted, strict=True)]


def _loss(model: nn.Module, batch: Batch, precision: Precision) -> Tensor:
    with precision.autocast():
        loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach().float()


def _alone(model: nn.Module, steps: Sequence[Sequence[Batch]], rank: int, precision: Precision) -> list[Tensor]:
    def average(batches: Sequence[Batch]) -> Tensor:
        losses = [_loss(model, batch, precision) for batch in batches]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(batches)
        return losses[rank]

    return _trained(model, average, steps)


def _trained(
    model: nn.Module, gradients: Callable[[Sequence[Batch]], Tensor], steps: Sequence[Sequence[Batch]]
) -> list[Tensor]:
    """Train by SGD; return the losses and the change of the weights. gradients: computes them, and returns the loss."""
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    losses = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        losses.append(gradients(step))
        optimizer.step()
    change = [(now.detach() - then).flatten() for now, then in zip(model.parameters(), before, strict=True)]
    return [torch.stack(losses), torch.cat(change)]
