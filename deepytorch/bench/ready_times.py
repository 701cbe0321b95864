"""When gradients become ready: the compute of a training step, measured part by part without communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.bench.calibrated import Compute


def measured_ready_times(
    model: nn.Module,
    forward: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    begin: Callable[[], object] = lambda: None,
) -> Compute:
    """Measure a step of `model`, and when in the backward pass each gradient is accumulated. The optimizer steps too.

    Args:
        model: Its parameters get hooks, which are removed at the end. A DDP is to be inside of its `no_sync`.
        forward: Computes the loss of a batch, which is differentiated.
        optimizer: Of the model.
        begin: Called before the step and not timed, such as a barrier of ranks that share cores.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    device = next(iter(parameters.values())).device
    times: dict[str, Any] = {}

    def mark(name: str) -> None:
        times[name] = _now(device)

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(name))
        for name, parameter in parameters.items()
    ]
    try:
        optimizer.zero_grad()
        begin()
        cpu_s = time.process_time()
        mark(" start")
        loss = forward()
        mark(" forward")
        loss.backward()  # type: ignore[no-untyped-call]
        mark(" backward")
        optimizer.step()
        mark(" optimizer")
        cpu_s = time.process_time() - cpu_s
    finally:
        for hook in hooks:
            hook.remove()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ready = [
        (_seconds(times[" forward"], times[name]), parameter.numel() * parameter.element_size())
        for name, parameter in parameters.items()
        if name in times  # unused ones have no gradient
    ]
    return Compute(
        forward_s=_seconds(times[" start"], times[" forward"]),
        backward_s=_seconds(times[" forward"], times[" backward"]),
        optimizer_s=_seconds(times[" backward"], times[" optimizer"]),
        cpu_s=cpu_s,
        ready=tuple(sorted(ready)),
    )


def _now(device: torch.device) -> Any:
    """Return a time of the CPU, or an event of the GPU's current stream, which does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two such times."""
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
