"""Training steps back to back, including the optimizer: the host may run ahead of the device, as in training.

If every step began with a wait, the host's work would never be hidden, and a step that makes the host wait would cost
nothing extra. So nothing waits here until the last step is launched; times come from marks in the device's stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from deepytorch.bench.measurement import rotated
from deepytorch.bench.training_step import Batch, ModelSetup, Precision, num_compilations
from deepytorch.errors import ParityError
from deepytorch.loading import prefetch

_LEARNING_RATE = 1e-5  # weights change, but losses stay close to each other
_TRIES = 3  # passes at most, until one compiles nothing


class Clock:
    """Marks between steps: CUDA events, for which no code waits, or the host's clock if there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._marks: list[float] = []

    def mark(self) -> None:
        """Set a mark after everything that was launched."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds from each mark to the next, after waiting for the last mark."""
        if self._device.type != "cuda":
            return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


@dataclass(slots=True)
class Trainee:
    """A setup in training. batches: on the host; each is moved while the step before runs, as a data loader does."""

    setup: ModelSetup
    optimizer: torch.optim.Optimizer
    batches: Sequence[Batch]
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))  # for fp16
    compiled_steps: int = 0

    def step(self, batch: Batch, precision: Precision) -> Tensor:
        """Run one step and return the loss before it, without waiting."""
        before = num_compilations()
        self.optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            loss = self.setup.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.compiled_steps += num_compilations() > before
        return loss.detach()

    def train(self, precision: Precision) -> list[float]:
        """Return the seconds of each step of a pass over the batches; repeat it if something compiled in it.

        Raises `ParityError` if the loss of the last step is not finite.
        """
        seconds: list[float] = []
        for _ in range(_TRIES):
            compiled_steps = self.compiled_steps
            precision.synchronize()
            clock, loss = Clock(precision.device), torch.zeros(())
            for batch in prefetch(self.batches, precision.device):
                clock.mark()
                loss = self.step(batch, precision)
            clock.mark()
            seconds = clock.seconds()
            if not math.isfinite(float(loss)):
                raise ParityError(f"The loss in {self.setup.name} is {float(loss)} after some steps of training.")
            if self.compiled_steps == compiled_steps:
                break
        return seconds


def trainees(setups: Mapping[str, ModelSetup], inputs: Mapping[str, Sequence[Batch]]) -> dict[str, Trainee]:
    """Return a trainee for each of `inputs`, with AdamW. Trainees with the same model share its optimizer."""
    optimizers: dict[int, torch.optim.Optimizer] = {}
    found = {}
    for name, batches in inputs.items():
        model = setups[name].model
        if id(model) not in optimizers:
            optimizers[id(model)] = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        found[name] = Trainee(setups[name], optimizers[id(model)], batches)
    return found


def train_in_turns(
    training: Mapping[str, Trainee], rounds: int, precision: Precision, notify: Callable[[str], None]
) -> dict[str, list[list[float]]]:
    """Return `seconds[name][batch]`, one time per round.

    Passes over all batches take turns, after one that is not timed.
    """
    for name, trainee in training.items():
        notify(f"Training, not timed yet: {name}")
        trainee.train(precision)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in each.batches] for name, each in training.items()}
    for turn in range(rounds):
        for name in rotated(list(training), turn):
            notify(f"Training: round {turn + 1} of {rounds}, {name}")
            for times, taken in zip(seconds[name], training[name].train(precision), strict=True):
                times.append(taken)
    return seconds
