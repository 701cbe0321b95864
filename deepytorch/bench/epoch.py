"""`deepytorch bench epoch`: real tokens per second over an epoch, relative to a good user's baseline: sorted lengths.

Padding can also be avoided by the order of the rows: Trainer's `group_by_length` puts rows of similar lengths into a
batch. That changes the batches of a step (they are no longer drawn at random), so it is no speed-up of the same
training; it is the baseline that a user would name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.models import MAX_POSITIONS, batch_kind, build_model
from deepytorch.bench.options import check_at_least
from deepytorch.bench.results import Record
from deepytorch.bench.training_step import Batch, Precision, compiled_arm, machine_and_threads, to_device
from deepytorch.data import batches, load_rows, num_positions, num_tokens, train_tokenizer
from deepytorch.data.batching import Labels, Order
from deepytorch.errors import ConfigError

# (backend, order) of each arm. The first is the baseline.
ARMS: tuple[tuple[str, Order], ...] = (
    ("inductor", "length"),
    ("inductor", "random"),
    ("deepytorch", "random"),
    ("deepytorch", "length"),
)
_WARM_UP = 4  # steps of each arm that may compile, including its longest and its shortest batch
_BLOCK = 4  # steps between two looks at the clock


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """The options of the measurement: an epoch over `rows` rows, `steps` of its batches, spread evenly over it."""

    model: str = "llama"
    size: str = "small"
    labels: Labels = "response"
    data: Path | None = None
    rows: int = 3200
    batch_size: int = 8
    steps: int = 32
    rounds: int = 3
    dtype: str = "fp32"
    device: str = "cpu"
    vocab_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that cannot be run with."""
        check_at_least(self, 1, "batch_size", "steps", "rounds")
        if self.rows < self.batch_size * self.steps:
            raise ConfigError(
                f"rows is {self.rows}, expected at least {self.batch_size * self.steps}: {self.steps} batches of "
                f"{self.batch_size}."
            )


@dataclass(frozen=True, kw_only=True)
class EpochArm(Record):
    """One way to train. tokens_per_s: real tokens (no pads). ratio: to the first arm, above 1 is faster."""

    backend: str
    order: str
    tokens_per_s: float
    ratio: float
    real_token_fraction: float
    compiled_steps: int


@dataclass(frozen=True, kw_only=True)
class EpochResult(Record):
    """The result of the measurement, and its options."""

    model: str
    model_size: str
    batch_size: int
    rows: int
    steps: int
    rounds: int
    dtype: str
    device: str
    labels: str
    arms: list[EpochArm]
    torch_version: str
    machine: str


def run_epoch(options: EpochOptions, notify: Callable[[str], None] = lambda text: None) -> EpochResult:
    """Train every arm on its own batches of one epoch, in turns of a few steps, with AdamW; the clock times blocks.

    All arms begin with the same weights. Steps that compile come first and are not timed.
    """
    precision = Precision.parse(options.device, options.dtype)
    kind = batch_kind(options.model)
    notify("Preparing data and models")
    data: dict[Order, list[Batch]] = {order: epoch_batches(options, order) for order in ("length", "random")}
    names = [f"{backend}, {order}" for backend, order in ARMS]
    training = {name: _trainee(options, *arm, data, precision) for name, arm in zip(names, ARMS, strict=True)}
    for name, trainee in training.items():
        notify(f"Compiling: {name}")
        by_length = sorted(trainee.batches, key=lambda batch: num_positions(batch, kind))
        for batch in (*by_length[:1], *by_length[-1:], *trainee.batches[: _WARM_UP - 2]):
            trainee.step(to_device(batch, precision.device), precision)

    def timed(trainee: Trainee, block: int) -> float:
        return sum(trainee.train(precision, slice(block * _BLOCK, (block + 1) * _BLOCK)))

    arms = {name: partial(timed, trainee) for name, trainee in training.items()}
    num_blocks = math.ceil(len(data["length"]) / _BLOCK)
    measured = Measurement.in_turns(arms, num_blocks, options.rounds, notify)
    tokens = {order: sum(num_tokens(batch, kind) for batch in data[order]) for order in data}
    positions = {order: sum(num_positions(batch, kind) for batch in data[order]) for order in data}
    rates = [tokens[order] / sum(measured.steady(name)) for name, (_, order) in zip(names, ARMS, strict=True)]
    return EpochResult.of(
        options,
        model_size=options.size,
        device=precision.device_name(),
        arms=[
            EpochArm(
                backend=backend,
                order=order,
                tokens_per_s=rate,
                ratio=rate / rates[0],
                real_token_fraction=tokens[order] / positions[order],
                compiled_steps=training[name].compiled_steps,
            )
            for name, (backend, order), rate in zip(names, ARMS, rates, strict=True)
        ],
        torch_version=torch.__version__,
        machine=machine_and_threads(),
    )


def _trainee(
    options: EpochOptions, backend: str, order: Order, data: Mapping[Order, list[Batch]], precision: Precision
) -> Trainee:
    model: torch.nn.Module = build_model(options.model, options.size, vocab_size=options.vocab_size, seed=options.seed)
    arm = compiled_arm(f"{backend}, {order}", model.to(precision.device), backend)
    return Trainee(arm, torch.optim.AdamW(model.parameters(), lr=1e-4), data[order])


def epoch_batches(options: EpochOptions, order: Order) -> list[Batch]:
    """Return `steps` batches of one epoch over `rows` rows in that order, evenly spread over it."""
    rows = load_rows(options.data)
    every = list(
        batches(
            rows[: options.rows],
            train_tokenizer(rows, options.vocab_size),
            batch_size=options.batch_size,
            max_length=MAX_POSITIONS,
            labels=options.labels,
            seed=options.seed,
            kind=batch_kind(options.model),
            order=order,
            steps=min(options.rows, len(rows)) // options.batch_size - 1,
        )
    )
    steps = min(options.steps, len(every))
    return [every[at * len(every) // steps] for at in range(steps)]
