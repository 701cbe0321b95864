"""Linear layer and cross-entropy, forward and backward, in bf16: ours, eager, Inductor and Liger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from deepytorch.bench.memory import peak_step_bytes
from deepytorch.gpu_check.figures.timing import OURS, median_ms, memory_may_not_suffice, require_gpu, timed
from deepytorch.gpu_check.outcome import Check, Failed, Found
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy

_SUBJECT = "speed of linear + cross-entropy"
_SIZES = ((4096, 4096, 128_256), (8192, 4096, 131_072))
_SMALL = ((64, 32, 512), (96, 32, 600))
_LARGEST_DIFFERENCE = 2e-2  # of losses near log(classes), in bf16
_MADE: dict[str, Loss] = {}  # by setup, in this process

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    seconds = {OURS: 6.0, "eager": 3.0, "Inductor": 4.0, "Liger": 6.0}
    for setup, expected_s in seconds.items():
        group = f"{_SUBJECT}: {setup}"
        needs = ("liger_kernel",) if setup == "Liger" else ()
        run: Callable[[], str | Found]
        if setup == "Inductor":
            run = partial(prepare, device, setup)
            yield Check(group, "compiled", run, quick=False, deadline_s=180.0, expected_s=30.0)
        for size, small in zip(_SIZES, _SMALL, strict=True):
            run = partial(timed_loss, device, setup, size if device.type == "cuda" else small)
            name = " x ".join(map(str, size))
            yield Check(group, name, run, False, is_timed=True, deadline_s=120.0, expected_s=expected_s, needs=needs)


def prepare(device: torch.device, setup: str) -> str:
    """Compile for any number of rows, on few of them."""
    for rows in (256, 384):  # a number of rows that changes becomes a symbol
        _step(_loss_of(setup), _inputs(device, (rows, 128, 1024)))
    return "compiled"


def timed_loss(device: torch.device, setup: str, size: tuple[int, int, int]) -> Found:
    """Time one setup at (rows, hidden, classes), once its loss is near that of float32."""
    if setup == "Liger":
        require_gpu(device)
    with memory_may_not_suffice(setup):
        inputs, loss = _inputs(device, size), _loss_of(setup)
        found, wanted = float(_step(loss, inputs)), _exact(inputs)
        if not abs(found - wanted) <= _LARGEST_DIFFERENCE * wanted:
            raise Failed(f"the loss of {setup} is {found:.5g}, and in float32 {wanted:.5g}")
        run = partial(_step, loss, inputs)
        peak = peak_step_bytes(run, device) - sum(each.nbytes for each in inputs[:2])  # the gradients, as large as they
        ms = median_ms(run, device)
    rows, hidden, classes = size
    num_bytes = 2.0 * 2 * (rows * hidden + classes * hidden)  # read, and gradients written
    return timed(device, ms, flops=6.0 * rows * hidden * classes, num_bytes=num_bytes, beyond_mb=max(0, peak) / 2**20)


def _step(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    found = loss(*inputs)
    torch.autograd.grad(found, inputs[:2])
    return found.detach()


def _inputs(device: torch.device, size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    rows, hidden, classes = size
    torch.manual_seed(0)
    states = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    return states, weight, torch.randint(0, classes, (rows,), device=device)


def _exact(inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the loss with logits in float32, made of a few rows at a time."""
    states, weight, target = (each.detach() for each in inputs)
    weight, total = weight.float(), 0.0
    for begin in range(0, len(target), 512):
        logits = linear(states[begin : begin + 512].float(), weight)
        total += float(cross_entropy(logits, target[begin : begin + 512], reduction="sum"))
    return total / len(target)


def _loss_of(setup: str) -> Loss:
    if setup not in _MADE:
        _MADE[setup] = _SETUPS[setup]()
    return _MADE[setup]


def _plain(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(linear(states, weight), target)


def _compiled() -> Loss:
    return torch.compile(_plain)


def _liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    made = LigerFusedLinearCrossEntropyLoss()
    return lambda states, weight, target: made(weight, states, target)


_SETUPS: dict[str, Callable[[], Loss]] = {
    OURS: lambda: linear_cross_entropy,
    "eager": lambda: _plain,
    "Inductor": _compiled,
    "Liger": _liger,
}
