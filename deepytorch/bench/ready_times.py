"""When gradients become ready: the compute of a training step, measured part by part without communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.bench.calibrated import Compute


def measured_ready_times(
    model: nn.Module,
    forward: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 3,
    warm_up: int = 1,
    begin: Callable[[], object] = lambda: None,
) -> Compute:
    """Measure steps of `model`, and when in the backward pass each gradient is accumulated; medians over `steps`.

    Every step trains: the optimizer steps too. Where other work disturbs the machine, single steps that take turns with
    steps that communicate compare better: `steps=1, warm_up=0`.

    Args:
        model: Its parameters get hooks, which are removed at the end. A DDP is to be inside of its `no_sync`.
        forward: Computes the loss of a batch, which is differentiated.
        optimizer: Of the model.
        steps: The number of steps that count.
        warm_up: The number of steps in front of them, which do not.
        begin: Called before each step and not timed, such as a barrier of ranks that share cores.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    device = next(parameter.device for parameter in model.parameters())
    found: list[dict[str, Any]] = []
    cpu_s: list[float] = []

    def accumulated(parameter: Tensor) -> None:
        found[-1][names[id(parameter)]] = _now(device)

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in parameters]
    try:
        for _ in range(warm_up + steps):
            optimizer.zero_grad()
            begin()
            found.append({})
            cpu_s.append(-time.process_time())
            found[-1][" start"] = _now(device)
            loss = forward()
            found[-1][" forward"] = _now(device)
            loss.backward()  # type: ignore[no-untyped-call]
            found[-1][" backward"] = _now(device)
            optimizer.step()
            found[-1][" optimizer"] = _now(device)
            cpu_s[-1] += time.process_time()
    finally:
        for hook in hooks:
            hook.remove()
    between = partial(_median, device, found[warm_up:])
    ready = [
        (between(" forward", names[id(parameter)]), parameter.numel() * parameter.element_size())
        for parameter in parameters
        if names[id(parameter)] in found[-1]  # unused ones have no gradient
    ]
    return Compute(
        forward_s=between(" start", " forward"),
        backward_s=between(" forward", " backward"),
        optimizer_s=between(" backward", " optimizer"),
        cpu_s=statistics.median(cpu_s[warm_up:]),
        ready=tuple(sorted(ready)),
    )


def _now(device: torch.device) -> Any:
    """Return a time of the CPU, or an event of the GPU's current stream, which does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _median(device: torch.device, steps: list[dict[str, Any]], begin: str, end: str) -> float:
    """Return the seconds between two times of a step."""
    if device.type != "cuda":
        return statistics.median(step[end] - step[begin] for step in steps)
    torch.cuda.synchronize(device)
    return statistics.median(step[begin].elapsed_time(step[end]) / 1e3 for step in steps)
