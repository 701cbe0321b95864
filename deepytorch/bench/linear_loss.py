"""`deepytorch bench loss`: time and memory of a linear layer and its cross-entropy, forward and backward.

The loss runs in eager, compiled by Inductor, and in one operator that never holds all logits (`deepytorch.passes.ops`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from deepytorch.bench.measurement import Measurement
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.options import check_at_least
from deepytorch.bench.results import Record
from deepytorch.bench.training_step import Precision, machine_and_threads
from deepytorch.errors import ConfigError, ParityError
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy

_IGNORED = -100
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of losses near log(classes)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The options of the measurement. rows: tokens. ignored: the fraction of them without a label."""

    rows: int = 4096
    hidden_size: int = 256
    vocab_size: int = 128_256
    ignored: float = 0.0
    dtype: str = "fp32"
    device: str = "cpu"
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that cannot be run with."""
        check_at_least(self, 1, "rows", "hidden_size", "vocab_size", "rounds")
        if not 0.0 <= self.ignored < 1.0:
            raise ConfigError(f"ignored is {self.ignored:g}, expected a fraction from 0 to below 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossArm(Record):
    """One way to compute the loss.

    Attributes:
        seconds: of forward and backward, the median of the rounds.
        time_ratio: to eager, below 1 is faster.
        peak_mb: peak memory of tensors beyond the inputs, including the gradients, MiB.
        memory_ratio: to eager.
    """

    name: str
    seconds: float
    time_ratio: float
    peak_mb: float
    memory_ratio: float | None
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossResult(Record):
    """The result of the measurement. gradients_mb: of the hidden states and of the weight, MiB."""

    options: LossOptions
    arms: list[LossArm]
    gradients_mb: float
    device: str
    torch_version: str
    machine: str


def run_loss(options: LossOptions, notify: Callable[[str], None] = lambda text: None) -> LossResult:
    """Measure every arm on the same tensors, in turns. Raises `ParityError` if their losses differ."""
    precision = Precision.parse(options.device, options.dtype, options.dtype)
    inputs = _inputs(options, precision)
    arms: dict[str, Loss] = {"eager": _plain, "inductor": torch.compile(_plain), "deepytorch": _fused}
    losses, peaks = {}, {}
    for name, loss in arms.items():
        notify(f"Once, which is not timed: {name}")
        losses[name] = _step(loss, inputs, precision)
        for each in inputs[:2]:
            each.grad = None  # the peak is to hold them
        peaks[name] = peak_step_bytes(partial(_step, loss, inputs, precision), precision.device)
    _compare(losses, precision.dtype)

    def timed(loss: Loss, _: int) -> float:
        begin = time.perf_counter()
        _step(loss, inputs, precision)
        return time.perf_counter() - begin

    in_turns = {name: partial(timed, loss) for name, loss in arms.items()}
    measured = Measurement.in_turns(in_turns, 1, options.rounds, notify)
    eager = peaks["eager"]
    return LossResult(
        options=options,
        arms=[
            LossArm(
                name=name,
                seconds=measured.steady(name)[0],
                time_ratio=measured.ratio(name, "eager"),
                peak_mb=peak / 2**20,
                memory_ratio=peak / eager if eager else None,
                loss=losses[name],
            )
            for name, peak in peaks.items()
        ],
        gradients_mb=sum(each.nbytes for each in inputs[:2]) / 2**20,
        device=precision.device_name(),
        torch_version=torch.__version__,
        machine=machine_and_threads(),
    )


def _inputs(options: LossOptions, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (rows, hidden), weight (classes, hidden) and targets (rows,)."""
    generator = torch.Generator().manual_seed(options.seed)
    hidden = torch.randn(options.rows, options.hidden_size, generator=generator)
    weight = torch.randn(options.vocab_size, options.hidden_size, generator=generator) / options.hidden_size**0.5
    target = torch.randint(options.vocab_size, (options.rows,), generator=generator)
    target[torch.randperm(options.rows, generator=generator)[: round(options.ignored * options.rows)]] = _IGNORED
    hidden, weight = (each.to(precision.device, precision.dtype).requires_grad_() for each in (hidden, weight))
    return hidden, weight, target.to(precision.device)


def _plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight), target, ignore_index=_IGNORED)


def _fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, ignore_index=_IGNORED)


def _step(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], precision: Precision) -> float:
    """Run forward and backward, starting without gradients; return the loss."""
    for each in inputs[:2]:
        each.grad = None
    found = loss(*inputs)
    found.backward()
    precision.synchronize()
    return float(found.detach())


def _compare(losses: dict[str, float], dtype: torch.dtype) -> None:
    for name, loss in losses.items():
        if not abs(loss - losses["eager"]) <= _LARGEST_DIFFERENCE[dtype] * abs(losses["eager"]):
            raise ParityError(f"The loss of {name} is {loss}, eager's {losses['eager']}; expected the same.")
