"""The measuring of `deepytorch bench loss`, in one process: see `loss` for its options, rows and table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.loss import LossOptions
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.training_step import Batch, ModelSetup, Precision, forward_backward, peak_bytes_of
from deepytorch.errors import ParityError
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.switch import SWITCH

Job = LossOptions
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
_IGNORED = -100
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of losses near log(classes)


def run(job: LossOptions, turns: Turns) -> dict[str, Any]:
    """Measure as the one job of a process."""
    SWITCH.enabled = False
    return measure(job, partial(turns.say, DOING))


def measure(options: LossOptions, notify: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every setup on the same tensors, in turns; return by name its figures: see `loss.Loss.rows`.

    Raises `ParityError` if their losses differ.
    """
    precision = Precision.parse(options.device, options.dtype, options.dtype)
    hidden, weight, target = _inputs(options, precision)
    leaves, batch = nn.ParameterList([hidden, weight]), {"target": target}
    setups, losses, peaks = {}, {}, {}
    for name, loss in {"eager": _plain, "inductor": torch.compile(_plain), "deepytorch": _fused}.items():
        setups[name] = ModelSetup(name, leaves, partial(_loss_of, loss, leaves))
        notify(f"Once, which is not timed: {name}")
        losses[name] = forward_backward(setups[name], batch, precision).loss
        peaks[name] = peak_bytes_of(setups[name], batch, precision)
    _compare(losses, precision.dtype)

    def timed(setup: ModelSetup, _: int) -> float:
        return forward_backward(setup, batch, precision).seconds

    in_turns = {name: partial(timed, setup) for name, setup in setups.items()}
    measured = Measurement.in_turns(in_turns, 1, options.rounds, notify)
    return {
        name: {
            "step_s": measured.steady(name)[0],
            "peak_mb": peak / 2**20,
            "loss": losses[name],
            "gradients_mb": (hidden.nbytes + weight.nbytes) / 2**20,
        }
        for name, peak in peaks.items()
    }


def _loss_of(loss: Loss, leaves: nn.ParameterList, batch: Batch) -> Tensor:
    hidden, weight = leaves
    return loss(hidden, weight, batch["target"])


def _inputs(options: LossOptions, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (rows, hidden), weight (classes, hidden) and targets (rows,)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.rows, options.hidden_size, generator=generator)
    weight = torch.randn(options.vocab_size, options.hidden_size, generator=generator) / options.hidden_size**0.5
    target = torch.randint(options.vocab_size, (options.rows,), generator=generator)
    target[torch.randperm(options.rows, generator=generator)[: round(options.ignored * options.rows)]] = _IGNORED
    hidden, weight = (each.to(precision.device, precision.dtype) for each in (hidden, weight))
    return hidden, weight, target.to(precision.device)


def _plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight), target, ignore_index=_IGNORED)


def _fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, ignore_index=_IGNORED)


def _compare(losses: Mapping[str, float], dtype: torch.dtype) -> None:
    for name, loss in losses.items():
        if not abs(loss - losses["eager"]) <= _LARGEST_DIFFERENCE[dtype] * abs(losses["eager"]):
            raise ParityError(f"The loss of {name} is {loss}, eager's {losses['eager']}; expected the same.")
