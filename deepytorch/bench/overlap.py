"""Data-parallel training as one rank: the parts of steps, and what bounds the overlap of compute and communication.

Compute alone is that of steps under `no_sync`; communication alone is that of the setup's buckets, one after the other.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.bench.calibrated import BUCKET_CAP_BYTES
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.jobs import OverlapJob
from deepytorch.bench.parallel import loss_of
from deepytorch.bench.timeline import Span
from deepytorch.bench.training import Run, opened
from deepytorch.comm.gradients.reducer import GradientReducer
from deepytorch.comm.gradients.registry import reducers
from deepytorch.torch_internals import dynamo_config

Job = OverlapJob
_PROJECTIONS = 8  # of each gradient
_PIECE = 1 << 17  # values that are projected at once


def run(job: OverlapJob, turns: Turns) -> dict[str, Any]:
    """Train; in each turn time a step, compute alone and communication alone.

    Returns, besides what `Run.found` says: `seconds` of forward and backward, `parts` and `alone` of each step, seconds
    of `communication`, `spans` of the last step, `bucket_bytes`, and on rank 0 `gradients` (see `projected`) of the
    first batch at the first weights, by what runs in the end. Raises `ParityError` if the loss is not finite.
    """
    if job.parallel.compile:  # stock splits a model by DDP's buckets, or traces its reducer
        dynamo_config.optimize_ddp = "python_reducer" if job.python_reducer else True
        dynamo_config.compiled_autograd = job.python_reducer
    every = opened(job)
    steps = _Steps(every)
    first = {name: value.clone() for name, value in steps.model.state_dict().items()}
    every.warm_up(turns)
    for number in range(job.warm_up):
        turns.say(DOING, f"{job.model}, compute alone, step {number + 1} of the warm-up")
        steps.run(number, sync=False)
    every.wait_for_code()
    found: dict[str, list[Any]] = {"seconds": [], "parts": [], "alone": [], "communication": []}
    for _ in range(job.steps):
        turns.take()
        number = every.count - every.first_timed
        parts = steps.run(number)
        spans = [asdict(span) for span in steps.spans()]
        every.wait_for_code()
        found["seconds"].append(parts.forward + parts.backward)
        found["parts"].append(asdict(parts))
        found["alone"].append(asdict(steps.run(number, sync=False)))
        found["communication"].append(steps.communication_seconds())
        every.wait_for_code()
        turns.hand_on()
    buckets, said = steps.bucket_bytes(), every.found()
    steps.model.load_state_dict(first)
    steps.run(0)
    gradients = projected(steps.model) if every.rank == 0 else {}
    return said | found | {"spans": spans, "bucket_bytes": buckets, "gradients": gradients}


@dataclass(frozen=True, slots=True)
class Parts:
    """The seconds of the parts of one step, on one rank."""

    forward: float
    backward: float
    optimizer: float


class _Steps:
    """The steps of a run, in parts."""

    def __init__(self, every: Run) -> None:
        self._every = every
        made: Any = every.trainer
        self._autocast, self._call, self._optimizer = made.autocast, made._call, made.optimizer
        self.model: nn.Module = every.trainer.model
        self._last = 0.0, Parts(0.0, 0.0, 0.0)  # the start and the parts of the last step

    def run(self, number: int, *, sync: bool = True) -> Parts:
        """Train on the batch of a number. Without `sync` gradients stay on their rank, and weights as they are."""
        [batch] = self._every.batches(number)
        model: Any = self.model
        dist.barrier()
        with contextlib.nullcontext() if sync else model.no_sync():
            self._optimizer.zero_grad()
            began = self._now()
            with self._autocast():
                loss = loss_of(self._call(**batch))
            forward = self._now()
            loss.backward()  # type: ignore[no-untyped-call]
            backward = self._now()
            if sync:
                self._optimizer.step()
                self._every.keep(loss.detach())
            parts = Parts(forward - began, backward - forward, self._now() - backward)
        self._last = began, parts
        return parts

    def _now(self) -> float:
        if self._every.device.type == "cuda":
            torch.cuda.synchronize(self._every.device)
        return time.perf_counter()

    def _reducer(self) -> GradientReducer | None:
        """Return the reducer of the gradients, if it is deepytorch's."""
        first = next(self.model.parameters())
        return next((each for each in reducers() if each.parameters[0] is first), None)

    def bucket_bytes(self) -> list[int]:
        """Return the bytes of each bucket that is sent in a step."""
        reducer = self._reducer()
        sent = [] if reducer is None else [transfer.num_bytes for transfer in reducer.counts.transfers]
        return sent or self._stock_bytes()

    def _stock_bytes(self) -> list[int]:
        total = sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)
        return [min(BUCKET_CAP_BYTES, total - start) for start in range(0, total, BUCKET_CAP_BYTES)]

    def communication_seconds(self) -> float:
        """Return the seconds of the buckets alone, one after the other.

        If stock's buckets take less on the same process group, their time counts.
        """
        return min(self._seconds_of(self.bucket_bytes()), self._seconds_of(self._stock_bytes()))

    def _seconds_of(self, sizes: list[int]) -> float:
        buffers = [torch.zeros(-(-size // 4), device=self._every.device) for size in sizes]
        dist.barrier()
        begin = self._now()
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()
        return self._now() - begin

    def spans(self) -> list[Span]:
        """Return the last step as spans of time, from its beginning."""
        begin, parts = self._last
        ends = (parts.forward, parts.forward + parts.backward)
        found = [Span("compute", "forward", 0.0, ends[0]), Span("compute", "backward", *ends)]
        found.append(Span("compute", "optimizer", ends[1], ends[1] + parts.optimizer))
        reducer = self._reducer()
        for transfer in reducer.counts.transfers if reducer is not None else ():
            size = f"{transfer.num_bytes / 2**20:.2g} MB"
            name = f"rows, {size}" if transfer.as_rows else f"bucket {transfer.bucket}, {size}"
            found.append(Span("communication", name, transfer.started - begin, transfer.ended - begin))
            if transfer.waited > 1e-5:
                waits = transfer.wait_began - begin
                found.append(Span("waiting", name, waits, waits + transfer.waited))
        return found


def projected(model: nn.Module) -> dict[str, list[float]]:
    """Return of each parameter's gradient, by name, its norm and `_PROJECTIONS` random projections of it.

    A projection is the product with a vector of normal values / sqrt(projections), which are the same ones in every
    process. So the squared distance of two gradients' projections is that of the gradients, on average.
    """
    found = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        flat = torch.zeros(1) if parameter.grad is None else parameter.grad.detach().flatten().cpu()
        generator = torch.Generator().manual_seed(number)
        total = torch.zeros(_PROJECTIONS, dtype=torch.float64)
        for piece in flat.split(_PIECE):
            directions = torch.randn(_PROJECTIONS, len(piece), generator=generator, dtype=torch.float64)
            total += directions @ piece.double()
        found[name] = [float(flat.double().norm()), *(total / _PROJECTIONS**0.5).tolist()]
    return found
