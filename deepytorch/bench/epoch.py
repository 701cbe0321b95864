"""`deepytorch bench epoch`: real tokens per second over an epoch, relative to a good user's baseline: sorted lengths.

Padding can also be avoided by the order of the rows: Trainer's `group_by_length` puts rows of similar lengths into a
batch. That changes the batches of a step (they are no longer drawn at random), so it is no speed-up of the same
training; it is the baseline that a user would name.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepytorch.bench.models import MAX_POSITIONS, batch_kind, build_model
from deepytorch.bench.training_step import Arm, Batch, Precision, compiled_arm, num_compilations, rotated, to_device
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
        for name in ("batch_size", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1.")
        if self.rows < self.batch_size * self.steps:
            raise ConfigError(
                f"rows is {self.rows}, expected at least {self.batch_size * self.steps}: {self.steps} batches of "
                f"{self.batch_size}."
            )


@dataclass(frozen=True)
class EpochArm:
    """One way to train. tokens_per_s: real tokens (no pads). ratio: to the first arm, above 1 is faster."""

    backend: str
    order: str
    tokens_per_s: float
    ratio: float
    real_token_fraction: float
    compiled_steps: int


@dataclass(frozen=True)
class EpochResult:
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass
class _Runner:
    arm: Arm
    optimizer: torch.optim.Optimizer
    data: list[Batch]
    seconds: list[list[float]]  # of each block, one per round
    compiled_steps: int = 0

    def step(self, batch: Batch, precision: Precision) -> None:
        before = num_compilations()
        self.optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            loss = self.arm.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.compiled_steps += num_compilations() > before

    def block(self, at: int, precision: Precision) -> None:
        """Time one block; repeat it if something compiled in it."""
        for _ in range(2):
            compiled = self.compiled_steps
            precision.synchronize()
            begin = time.perf_counter()
            for batch in self.data[at * _BLOCK : (at + 1) * _BLOCK]:
                self.step(batch, precision)
            precision.synchronize()
            seconds = time.perf_counter() - begin
            if compiled == self.compiled_steps:
                break
        self.seconds[at].append(seconds)


def run_epoch(options: EpochOptions, notify: Callable[[str], None] = lambda text: None) -> EpochResult:
    """Train every arm on its own batches of one epoch, in turns of a few steps, with AdamW; the clock times blocks.

    All arms begin with the same weights. Steps that compile come first and are not timed.
    """
    precision = Precision.parse(options.device, options.dtype)
    kind = batch_kind(options.model)
    notify("Preparing data and models")
    data: dict[Order, list[Batch]] = {order: epoch_batches(options, order) for order in ("length", "random")}
    runners = []
    for backend, order in ARMS:
        model: torch.nn.Module = build_model(
            options.model, options.size, vocab_size=options.vocab_size, seed=options.seed
        )
        model = model.to(precision.device)
        moved = [to_device(batch, precision.device) for batch in data[order]]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        blocks: list[list[float]] = [[] for _ in range((len(moved) + _BLOCK - 1) // _BLOCK)]
        runners.append(_Runner(compiled_arm(f"{backend}, {order}", model, backend), optimizer, moved, blocks))
    for runner in runners:
        notify(f"Compiling: {runner.arm.name}")
        by_length = sorted(runner.data, key=lambda batch: num_positions(batch, kind))
        for batch in (*by_length[:1], *by_length[-1:], *runner.data[: _WARM_UP - 2]):
            runner.step(batch, precision)
    for turn, at in itertools.product(range(options.rounds), range(len(runners[0].seconds))):
        notify(f"Measuring: round {turn + 1} of {options.rounds}, block {at + 1} of {len(runners[0].seconds)}")
        for runner in rotated(runners, turn + at):
            runner.block(at, precision)
    rates = [_rate(runner, kind) for runner in runners]
    arms = [
        EpochArm(backend, order, rate, rate / rates[0], _real_fraction(runner, kind), runner.compiled_steps)
        for (backend, order), runner, rate in zip(ARMS, runners, rates, strict=True)
    ]
    device = torch.cuda.get_device_name(precision.device) if precision.device.type == "cuda" else "cpu"
    return EpochResult(
        options.model,
        options.size,
        options.batch_size,
        options.rows,
        options.steps,
        options.rounds,
        options.dtype,
        device,
        options.labels,
        arms,
        torch.__version__,
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
    )


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


def _rate(runner: _Runner, kind: Any) -> float:
    return sum(num_tokens(batch, kind) for batch in runner.data) / sum(map(statistics.median, runner.seconds))


def _real_fraction(runner: _Runner, kind: Any) -> float:
    positions: Sequence[int] = [num_positions(batch, kind) for batch in runner.data]
    return sum(num_tokens(batch, kind) for batch in runner.data) / sum(positions)
