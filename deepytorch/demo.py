"""`deepytorch demo`: one fine-tuning run in eager, under stock torch.compile and under deepytorch, side by side."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn

import deepytorch
from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.models import MAX_POSITIONS, MODELS, batch_kind, build_model
from deepytorch.bench.options import check_at_least, check_choice
from deepytorch.bench.plots import new_figure, save_figure
from deepytorch.bench.table import table_of
from deepytorch.bench.training_step import (
    Batch,
    Precision,
    compiled_setup,
    empty_compile_caches,
    start_compiler,
    to_device,
)
from deepytorch.data import num_positions, num_tokens, text_batches
from deepytorch.errors import ConfigError, ParityError

# The first steps load code and fill memory pools; they are in the plot, not in the table.
_WARM_UP_STEPS = 3

# The allowed relative difference of a loss from eager's, at any step. Rounding grows from step to step: Adam divides by
# the root of the squared gradient, which turns rounding in small gradients into steps of full size. After 60 steps
# stock torch.compile is 1e-6 off in fp32 (2e-5 in bf16); 100 times that is allowed, and a real mistake is larger. In
# half precision two roundings of the loss itself are allowed, since tokens may be summed in another order.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# Wide and pale below, narrow and dark above: curves that coincide stay visible.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#bbbbbb", "linewidth": 6.0},
    {"color": "#e69f00", "linewidth": 3.0},
    {"color": "#0072b2", "linewidth": 1.2},
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model: the name shown, and the backend of torch.compile (None: not compiled)."""

    name: str
    backend: str | None


WAYS = (Way("eager", None), Way("torch.compile", "inductor"), Way("deepytorch", "deepytorch"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The options of the demo. All `ways` are compared with the first one."""

    model: str = "llama"
    size: str = "demo"
    data: Path | None = None
    steps: int = 50
    batch_size: int = 8
    device: str = "cpu"
    dtype: str = "fp32"
    out: Path = Path("deepytorch-demo")
    max_length: int = 512
    vocab_size: int = 4096
    learning_rate: float = 5e-4
    seed: int = 0
    ways: tuple[Way, ...] = WAYS

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers with which the demo cannot run."""
        if self.steps <= _WARM_UP_STEPS:
            raise ConfigError(f"steps is {self.steps}, expected more than the {_WARM_UP_STEPS} of the warm-up.")
        check_at_least(self, 1, "batch_size")
        check_choice(self, "model", MODELS)
        if not 1 <= self.max_length <= MAX_POSITIONS:
            raise ConfigError(f"max_length is {self.max_length}, expected 1 to {MAX_POSITIONS}, the models' positions.")


@dataclass(frozen=True, slots=True)
class Run:
    """One setup's training: loss and seconds of every step, and the indices of steps in which something compiled."""

    name: str
    losses: list[float]
    seconds: list[float]
    compiled_steps: set[int]

    @property
    def compile_seconds(self) -> float:
        """Return the time of steps that compiled beyond the median of the others."""
        others = [seconds for index, seconds in enumerate(self.seconds) if index not in self.compiled_steps]
        median = statistics.median(others or self.seconds)
        return sum(self.seconds[index] - median for index in self.compiled_steps)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result: the setups that ran to the end, why others failed, and each step's number of real tokens."""

    runs: list[Run]
    failures: dict[str, str]
    num_tokens: list[int]
    real_token_fraction: float
    tolerance: float

    def counted_steps(self) -> list[int]:
        """Return the steps whose times are in the table: after the warm-up, and without a compilation in any setup."""
        compiled = set[int]().union(*(run.compiled_steps for run in self.runs))
        warm = range(_WARM_UP_STEPS, len(self.num_tokens))
        return [step for step in warm if step not in compiled] or list(warm)

    # Medians throughout: the setups run one after another, and a machine that is busy for a while must not decide.

    def tokens_per_second(self, run: Run) -> float:
        """Return the median, over the counted steps, of real tokens a second in `run`."""
        return statistics.median(self.num_tokens[step] / run.seconds[step] for step in self.counted_steps())

    def median_step_ms(self, run: Run) -> float:
        """Return the median time of the counted steps in `run`."""
        return 1e3 * statistics.median(run.seconds[step] for step in self.counted_steps())

    def speedup(self, run: Run) -> float:
        """Return the median, over the counted steps, of the first setup's time over `run`'s for the same batch."""
        first = self.runs[0]
        return statistics.median(first.seconds[step] / run.seconds[step] for step in self.counted_steps())

    def loss_difference(self, run: Run) -> float:
        """Return the largest |loss - first's| / |first's| of all steps; infinite when a loss is not finite."""
        pairs = zip(run.losses, self.runs[0].losses, strict=True)
        return max(abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)

    def check(self, reference: str) -> None:
        """Raise `ParityError` when a setup failed, or lost the path of the setup `reference`."""
        problems = [f"{name} failed: {reason}" for name, reason in self.failures.items()]
        for run in self.runs if reference not in self.failures else ():
            difference = self.loss_difference(run)
            if not difference <= self.tolerance:
                problems.append(
                    f"the losses of {run.name} differ from {reference}'s by up to {difference:.1e} (relative), "
                    f"expected at most {self.tolerance:.0e}"
                )
        if problems:
            raise ParityError(f"The demo did not pass: {'; '.join(problems)}.")


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train every setup, one after another, from the same weights on the same batches; show progress, table and plot.

    Raises `ConfigError` or `DataError` for options or data that cannot be run, and `ParityError`, after everything has
    been shown, if a setup failed or its losses left eager's.
    """
    precision = Precision.parse(options.device, options.dtype)
    data, result = _prepare(options, precision)
    console.print(_headline(options, result), highlight=False)
    deepytorch.report(reset=True)
    with _progress(console) as progress:
        for way in options.ways:
            if not console.is_terminal:  # a log shows no bar before its end
                console.print(f"Training {way.name}", highlight=False)
            _run_way(way, options, precision, data, result, progress)
    if result.runs:
        console.print(_table(result))
        path = options.out / f"{options.model}.png"
        _plot(path, options, result)
        console.print(f"Plot: {path}", highlight=False, soft_wrap=True)
        console.print(str(deepytorch.report()), markup=False, highlight=False, soft_wrap=True)
    result.check(options.ways[0].name)
    return result


def _prepare(options: DemoOptions, precision: Precision) -> tuple[list[Batch], DemoResult]:
    drawn = text_batches(
        options.data,
        options.vocab_size,
        batch_size=options.batch_size,
        max_length=options.max_length,
        seed=options.seed,
        kind=batch_kind(options.model),
        steps=options.steps,
    )
    data = [to_device(batch, precision.device) for batch in drawn]
    kind = batch_kind(options.model)
    tokens = [num_tokens(batch, kind) for batch in data]
    fraction = sum(tokens) / sum(num_positions(batch, kind) for batch in data)
    return data, DemoResult([], {}, tokens, fraction, TOLERANCES[precision.dtype])


def _run_way(
    way: Way, options: DemoOptions, precision: Precision, data: Sequence[Batch], result: DemoResult, progress: Progress
) -> None:
    """Train one setup and enter its run, or why it failed, into `result`."""
    task = progress.add_task(way.name, total=len(data), detail="compiling" if way.backend else "")

    def show(loss: float, seconds: float) -> None:
        progress.update(task, advance=1, detail=f"loss {loss:.3f}  {seconds * 1e3:,.0f} ms")

    try:
        result.runs.append(_train(way, options, precision, data, show))
    except Exception as error:  # one setup may fail: the others are still worth seeing
        result.failures[way.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        progress.update(task, detail="failed")


def _train(
    way: Way, options: DemoOptions, precision: Precision, data: Sequence[Batch], show: Callable[[float, float], None]
) -> Run:
    """Train a fresh copy of the model on `data` with AdamW, compile caches empty at the beginning.

    Dropout is off: packed and padded steps would draw different masks, and losses could not be compared.
    """
    if way.backend is not None:
        start_compiler(way.backend, precision)
    with empty_compile_caches():
        model: nn.Module = build_model(options.model, options.size, vocab_size=options.vocab_size, seed=options.seed)
        model.to(precision.device)
        setup = compiled_setup(way.name, model, way.backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
        scaler = torch.amp.GradScaler(precision.device.type, enabled=precision.dtype == torch.float16)
        trainee, run = Trainee(setup, optimizer, data, scaler), Run(way.name, [], [], set())
        for index, batch in enumerate(data):
            precision.synchronize()
            compiled_steps = trainee.compiled_steps
            start = time.perf_counter()
            run.losses.append(float(trainee.step(batch, precision)))
            precision.synchronize()
            run.seconds.append(time.perf_counter() - start)
            if trainee.compiled_steps > compiled_steps and way.backend is not None:  # an optimizer may compile a helper
                run.compiled_steps.add(index)
            show(run.losses[-1], run.seconds[-1])
    return run


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[detail]}"), console=console)


def _headline(options: DemoOptions, result: DemoResult) -> str:
    source = "the embedded data set" if options.data is None else str(options.data)
    return (
        f"Fine-tuning a random-weight {options.model} on {source}: {options.steps} steps of {options.batch_size} rows, "
        f"{options.dtype} on {options.device}, {result.real_token_fraction:.0%} of the positions real tokens."
    )


def _plot(path: Path, options: DemoOptions, result: DemoResult) -> None:
    """Write a PNG: the setups' losses on the left, their step times in ms on the right (logarithmic).

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    steps = range(1, len(result.num_tokens) + 1)
    for run, style in zip(result.runs, itertools.cycle(_STYLES)):
        left.plot(steps, run.losses, label=run.name, **style)
        right.plot(steps, [1e3 * seconds for seconds in run.seconds], label=run.name, **style | {"linewidth": 1.5})
    left.set(xlabel="step", ylabel="loss", title="Loss, on the same batches")
    right.set(xlabel="step", ylabel="ms", yscale="log", title="Step time (peaks: compilation)")
    right.legend()
    left.legend()
    figure.suptitle(
        f"{options.model}, batch {options.batch_size}, {options.dtype}, {options.device}: "
        f"{result.real_token_fraction:.0%} real tokens"
    )
    save_figure(figure, path, "Give another folder with --out.")


def _table(result: DemoResult) -> Group:
    rows = [
        (
            run.name,
            f"{result.median_step_ms(run):,.0f}",
            f"{result.tokens_per_second(run):,.0f}",
            f"{result.speedup(run):.2f}x",
            f"{run.compile_seconds:.1f}" if run.compiled_steps else "-",
            f"{run.losses[-1]:.4f}",
            f"{result.loss_difference(run):.1e}" if run is not result.runs[0] else "-",
        )
        for run in result.runs
    ]
    columns = ("setup", "step ms", "tokens/s", "speedup", "compile s", "final loss", "loss diff.")
    table = table_of("The same batches, the same weights at the start", columns, rows, left=("setup",))
    note = (
        f"Times: medians over the {len(result.counted_steps())} steps after the warm-up in which no setup compiled. "
        f"speedup: the median, too, of each batch's time in {result.runs[0].name} over its own. "
        "compile s: what steps that compiled took beyond the median. "
        f"loss diff.: the largest of all steps, relative to {result.runs[0].name}."
    )
    return Group(table, Text(note, style="dim"))
