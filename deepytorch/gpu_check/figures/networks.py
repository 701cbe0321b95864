"""Networks without text under autocast to bf16: ResNet-50, and the UNet of Stable Diffusion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepytorch import paused
from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.training_step import Batch, ModelSetup, Precision, forward_backward, to_device
from deepytorch.bench.zoo import build_workload
from deepytorch.gpu_check.figures.timing import OURS, memory_may_not_suffice, timed
from deepytorch.gpu_check.outcome import Check, Failed, Found

_MODELS = {"ResNet-50": ("resnet50", ()), "Stable Diffusion UNet": ("sd_unet", ("diffusers",))}
_COMPILING_S = {  # of the first step, for a plan
    "ResNet-50": {OURS: 50.0, "eager": 8.0, "Inductor": 45.0},
    "Stable Diffusion UNet": {OURS: 150.0, "eager": 20.0, "Inductor": 120.0},
}
_BACKENDS = {OURS: "deepytorch", "eager": None, "Inductor": "inductor"}
_BATCHES, _ROUNDS = 4, 2
_LOSS_OFF = 2e-2
_MADE: dict[tuple[str, str], tuple[ModelSetup, list[Batch]]] = {}  # in this process


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for name, (model, needs) in _MODELS.items():
        for setup, expected_s in _COMPILING_S[name].items():
            group = f"step of {name}: {setup}"
            run = partial(prepare, device, model, setup)
            yield Check(group, "first step", run, False, deadline_s=280.0, expected_s=expected_s, needs=needs)
            timed_run = partial(timed_network, device, model, setup)
            yield Check(
                group, "full size, AMP", timed_run, False, is_timed=True, deadline_s=120.0, expected_s=3.0, needs=needs
            )


def prepare(device: torch.device, model: str, setup: str) -> Found:
    """Compile, and see that the first loss is near eager's. The figure is the time until a step has run that way."""
    precision = Precision(device, torch.bfloat16)
    with memory_may_not_suffice(setup):
        built, data = _made(device, model, setup)
        batch = to_device(data[0], device)
        with paused(), torch.no_grad(), precision.autocast():
            eager = float(built.model(**batch))
        began = time.perf_counter()
        loss = forward_backward(built, batch, precision).loss
        first_s = time.perf_counter() - began
    if not abs(loss - eager) <= _LOSS_OFF * abs(eager):
        raise Failed(f"the first loss is {loss:.5g}, and {eager:.5g} in eager")
    said = f"after {first_s:.1f} s; loss {loss:.5g}, {eager:.5g} in eager"
    return Found(said, {"first_step_s": first_s, "loss": loss, "eager_loss": eager})


def timed_network(device: torch.device, model: str, setup: str) -> Found:
    """Time steps back to back with SGD. The limit is that of the arithmetic alone."""
    precision = Precision(device, torch.bfloat16)
    with memory_may_not_suffice(setup):
        built, data = _made(device, model, setup)
        trainee = Trainee(built, torch.optim.SGD(built.model.parameters(), lr=1e-4, momentum=0.9, fused=True), data)
        trainee.train(precision)
        passes = [trainee.train(precision) for _ in range(_ROUNDS)]
        seconds = [min(each) for each in zip(*passes, strict=True)]
        batch = to_device(data[0], device)
        peak = peak_step_bytes(partial(forward_backward, built, batch, precision), device)
        flops = _flops(built.model, batch, precision)
    rows = len(next(iter(batch.values())))
    mean_s = sum(seconds) / len(seconds)
    return timed(device, 1e3 * mean_s, flops=flops, examples_per_s=rows / mean_s, peak_mb=peak / 2**20)


def _made(device: torch.device, model: str, setup: str) -> tuple[ModelSetup, list[Batch]]:
    if (model, setup) not in _MADE:
        full = device.type == "cuda"
        made = build_workload(model, "full" if full else "cpu")
        network: nn.Module = made.model.to(device)
        backend = _BACKENDS[setup]
        call = network if backend is None else torch.compile(network, backend=backend)
        data = made.batches(made.rows if full else 2, 0, _BATCHES if full else 2)
        _MADE[model, setup] = (ModelSetup(setup, network, lambda batch: call(**batch)), data)
    return _MADE[model, setup]


def _flops(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Return the operations of products and convolutions of a step, forward and backward."""
    counter = FlopCounterMode(display=False)
    with paused(), counter, precision.autocast():
        model(**batch).backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())
