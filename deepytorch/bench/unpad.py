"""`deepytorch bench unpad`: the gain of stripping padding on real lengths, and that nothing else changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepytorch
from deepytorch.bench.back_to_back import train_in_turns, trainees
from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.hand_packed import ATTENTION_NAME, hand_packed_arm, pack, register_attention
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.models import MAX_POSITIONS, batch_kind, build_model
from deepytorch.bench.options import check_at_least, check_choice, dtype_name
from deepytorch.bench.rivals import FLASH, FLATTENED, GROUPED, flatten, flattened_arm, flattened_unavailable, grouped
from deepytorch.bench.schema import BACK_TO_BACK, ONE_BY_ONE, UnpadResult
from deepytorch.bench.training_step import (
    DTYPES,
    LOSSES,
    Arm,
    Batch,
    Precision,
    Step,
    compiled_arm,
    empty_compile_caches,
    forward_backward,
    machine_and_threads,
    start_compiler,
    to_device,
)
from deepytorch.data import IGNORE_INDEX, num_labels, num_positions, num_tokens, text_batches
from deepytorch.data.batching import Kind, Labels
from deepytorch.errors import ConfigError, ParityError

EAGER, STOCK, HAND_PACKED, DEEPYTORCH = "eager", "inductor", "handpacked", "deepytorch"

_NUM_WARM_BATCHES = 3  # stock torch.compile is stable after three compiles
_MAX_MEMORY_BATCHES = 4  # the profiler that counts bytes is slow; the batches with the most positions decide


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadOptions:
    """The options of the measurement.

    `backend` and `stock_backend` are those of the two compiled arms in torch.compile.
    """

    model: str = "llama"
    size: str = "small"
    labels: Labels = "response"
    loss: str = "model"
    data: Path | None = None
    batch_size: int = 8
    steps: int = 8  # batches
    rounds: int = 3  # number of measurements of each batch
    dtype: str = "fp32"
    weights: str = "fp32"  # or the same as `dtype`, without autocast
    device: str = "cpu"
    back_to_back: bool | None = None  # train, without a wait between steps; None: on a device
    max_length: int = MAX_POSITIONS
    vocab_size: int = 8192
    seed: int = 0
    backend: str = "deepytorch"
    stock_backend: str = "inductor"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that cannot be run with."""
        check_at_least(self, 1, "batch_size", "steps", "rounds", "max_length")
        check_choice(self, "loss", LOSSES)
        if self.trains and dtype_name(self.dtype) == "fp16":
            raise ConfigError(
                "dtype is fp16, which trains under a gradient scaler; expected fp32 or bf16 back to back."
            )
        if self.loss != "model" and batch_kind(self.model) != "causal":
            raise ConfigError(f"The loss {self.loss!r} is one over next tokens, expected a decoder, not {self.model}.")
        if self.max_length > MAX_POSITIONS:
            raise ConfigError(
                f"max_length is {self.max_length}, expected at most {MAX_POSITIONS}: the models' positions."
            )

    @property
    def trains(self) -> bool:
        """Return whether steps are timed back to back, with their optimizer."""
        return self.device.partition(":")[0] == "cuda" if self.back_to_back is None else self.back_to_back


def run_unpad(options: UnpadOptions, notify: Callable[[str], None] = lambda text: None) -> UnpadResult:
    """Measure every arm on the same batches and weights; `notify` is told the current activity.

    1. Each compiled arm runs all batches once, alone, from empty compile caches. Its compile time is the time of the
       steps that compile minus the steady times of the same batches. Both compilers were started before.
    2. Every batch goes through every arm, the order rotated from batch to batch and round to round, so that a change
       of the machine's speed affects all arms alike. A step is zeroing the gradients, forward and backward; packing by
       hand is not in the time of the hand-packed arm, since a collator would do it.
    3. Losses and gradients of the first round are compared with eager's. Weights do not change in it.
    4. Back to back, step 2 is for that comparison alone. Then every arm trains with AdamW on batches that come from the
       host, and passes over all batches take turns; see `back_to_back`. Rivals run where they are installed (`rivals`).

    Raises `ConfigError`, `DataError`, and `ParityError` when a loss or gradient is not finite.
    """
    precision = Precision.parse(options.device, options.dtype, options.weights)
    notify("Preparing data and models")
    data = draw_batches(options, precision.device)
    not_run = rivals_not_run(options, precision)
    arms = build_arms(options, precision.device)
    if FLATTENED not in not_run:
        arms[FLATTENED] = flattened_arm(_build(options, precision.device, FLASH), options.model, options.stock_backend)
    for backend in (options.stock_backend, options.backend):
        start_compiler(backend, precision)
    notify(f"Compiling with {options.stock_backend}, from empty caches")
    with empty_compile_caches():
        first_stock = [forward_backward(arms[STOCK], batch, precision) for batch in data]
    with empty_compile_caches():
        notify(f"Compiling with {options.backend}, from empty caches")
        deepytorch.report(reset=True)
        first_ours = [forward_backward(arms[DEEPYTORCH], batch, precision) for batch in data]
        for batch in data[:_NUM_WARM_BATCHES]:
            forward_backward(arms[STOCK], batch, precision)
        compared, differences = _measure(arms, data, 1 if options.trains else options.rounds, precision, notify)
        measured = Measurement(_train(options, arms, precision, notify)) if options.trains else compared
        counts = deepytorch.report().to_json()
        notify("Measuring batches without padding")
        unpadded = _measure_unpadded(arms, data, options, precision)
        notify("Measuring memory")
        kind = batch_kind(options.model)
        peaks = {name: _peak_bytes(arms[name], data, kind, precision) for name in (EAGER, STOCK, DEEPYTORCH)}
    found = _Findings(first_stock, first_ours, compared, differences, measured, counts, unpadded, peaks, not_run)
    return _result(options, precision, data, found)


@dataclass(slots=True)
class Differences:
    """The largest relative differences to eager over all batches, by arm: of losses, and of gradients."""

    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Findings:
    """The raw results: the first passes, the alternating runs, deepytorch's counters, bytes, and what was not run."""

    first_stock: list[Step]
    first_ours: list[Step]
    compared: Measurement  # step by step; if back to back, `measured` has other times
    differences: Differences
    measured: Measurement
    counts: Mapping[str, Any]
    unpadded: Measurement
    peak_bytes: dict[str, int]
    not_run: dict[str, str]


def _result(options: UnpadOptions, precision: Precision, data: Sequence[Batch], found: _Findings) -> UnpadResult:
    kind, measured = batch_kind(options.model), found.measured
    ratios = {name: measured.ratio(name) for name in measured.seconds}
    tokens = sum(num_tokens(batch, kind) for batch in data)
    positions = sum(num_positions(batch, kind) for batch in data)
    return UnpadResult.of(
        options,
        device=f"cuda ({precision.device_name()})" if precision.device.type == "cuda" else precision.device_name(),
        dtype=dtype_name(options.dtype),
        real_token_fraction=tokens / positions,
        ratio_vs_eager=ratios[EAGER],
        ratio_vs_inductor=ratios[STOCK],
        ratio_vs_handpacked=ratios.get(HAND_PACKED),
        ratio_vs_grouped=ratios.get(GROUPED),
        ratio_vs_flattened=ratios.get(FLATTENED),
        max_loss_rel_diff=found.differences.losses[DEEPYTORCH],
        max_grad_rel_diff=found.differences.gradients[DEEPYTORCH],
        recompiles=found.counts["recompiles"],
        steps_packed=found.counts["steps_packed"],
        steps_padded=found.counts["steps_padded"],
        compile_seconds=_compile_seconds(found.first_ours, found.compared.steady(DEEPYTORCH)),
        compile_seconds_inductor=_compile_seconds(found.first_stock, found.compared.steady(STOCK)),
        peak_memory_ratio_vs_eager=found.peak_bytes[DEEPYTORCH] / found.peak_bytes[EAGER],
        token_ceiling=positions / tokens,
        labelled_fraction=sum(map(num_labels, data)) / tokens,
        ratio_no_padding=found.unpadded.ratio(STOCK),
        host_ms_per_step=found.counts["host_ms_per_step"],
        grad_rel_diffs={name: worst for name, worst in found.differences.gradients.items() if name != EAGER},
        step_ms={name: statistics.fmean(measured.steady(name)) * 1e3 for name in measured.seconds},
        tokens_per_s={name: tokens / sum(measured.steady(name)) for name in measured.seconds},
        ratio_quartiles={  # batches with other rows cannot be compared one by one
            name: measured.ratio_quartiles(name) for name in ratios if name not in (DEEPYTORCH, GROUPED)
        },
        peak_bytes=found.peak_bytes,
        model_size=options.size,
        torch_version=torch.__version__,
        machine=machine_and_threads(),
        weights=dtype_name(options.weights),
        timing=BACK_TO_BACK if options.trains else ONE_BY_ONE,
        not_run=found.not_run,
    )


def rivals_not_run(options: UnpadOptions, precision: Precision) -> dict[str, str]:
    """Return the arms that are not measured, each with the reason."""
    kind = batch_kind(options.model)
    found = {}
    if kind != "causal" or options.loss != "model":
        found[HAND_PACKED] = "a row is packed by hand for decoders with a loss of their own"
    reason = flattened_unavailable(kind, options.loss, options.model, precision)
    if reason is not None:
        found[FLATTENED] = reason
    if not options.trains:
        found[GROUPED] = "batches of other rows compare over whole passes, back to back"
    return found


def _build(options: UnpadOptions, device: torch.device, attn_implementation: str = "sdpa") -> nn.Module:
    """Return the model, with weights drawn anew but always equal."""
    made: nn.Module = build_model(
        options.model,
        options.size,
        vocab_size=options.vocab_size,
        attn_implementation=attn_implementation,
        seed=options.seed,
    )
    return made.to(device, DTYPES[dtype_name(options.weights)])


def build_arms(options: UnpadOptions, device: torch.device) -> dict[str, Arm]:
    """Return the arms by name, each with a copy of the same weights on `device`."""
    model = partial(_build, options, device)
    arms = [
        compiled_arm(EAGER, model(), None, options.loss),
        compiled_arm(STOCK, model(), options.stock_backend, options.loss),
        compiled_arm(DEEPYTORCH, model(), options.backend, options.loss),
    ]
    if batch_kind(options.model) == "causal" and options.loss == "model":
        register_attention()
        arms.append(hand_packed_arm(HAND_PACKED, model(ATTENTION_NAME)))
    return {arm.name: arm for arm in arms}


def full_batches(data: Sequence[Batch], kind: Kind) -> list[Batch]:
    """Return as many batches of the same tokens, laid out without any padding, with a label wherever there can be one.

    The tokens of all batches are joined and cut into rows of one length, the mean of the real rows; the rest is
    dropped. A masked model keeps its labels, since they belong to its masked tokens.
    """
    on = [batch["attention_mask"].bool() for batch in data]
    ids = torch.cat([batch["input_ids"][mask] for batch, mask in zip(data, on, strict=True)])
    if kind == "seq2seq":
        labels = torch.cat([batch["labels"][batch["labels"] != IGNORE_INDEX] for batch in data])
    elif kind == "masked":
        labels = torch.cat([batch["labels"][mask] for batch, mask in zip(data, on, strict=True)])
    else:
        labels = ids
    num_rows = len(data[0]["input_ids"])
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": targets}
        for part, targets in zip(_cut(ids, len(data), num_rows), _cut(labels, len(data), num_rows), strict=True)
    ]


def _cut(tokens: Tensor, num_batches: int, num_rows: int) -> Tensor:
    """Lay (tokens,) out as (batches, rows, positions)."""
    row_length = tokens.numel() // (num_batches * num_rows)
    return tokens[: num_batches * num_rows * row_length].view(num_batches, num_rows, row_length)


def draw_batches(options: UnpadOptions, device: torch.device) -> list[Batch]:
    """Return the batches that `options` asks for, on `device`."""
    drawn = text_batches(
        options.data,
        options.vocab_size,
        batch_size=options.batch_size,
        max_length=options.max_length,
        labels=options.labels,
        seed=options.seed,
        kind=batch_kind(options.model),
        steps=options.steps,
    )
    return [to_device(batch, device) for batch in drawn]


def _steady_step(arm: Arm, batch: Batch, precision: Precision) -> Step:
    """Run one step, and once more if it compiled: compile times are those of the first passes, not part of a ratio."""
    step = forward_backward(arm, batch, precision)
    return forward_backward(arm, batch, precision) if step.compiled else step


def _compile_seconds(first: Sequence[Step], steady: Sequence[float]) -> float:
    """Return the time of the steps that compiled, beyond the steady time of the same batches."""
    return sum(max(0.0, step.seconds - later) for step, later in zip(first, steady, strict=True) if step.compiled)


def _measure(
    arms: Mapping[str, Arm], data: Sequence[Batch], rounds: int, precision: Precision, notify: Callable[[str], None]
) -> tuple[Measurement, Differences]:
    """Run every batch through every arm, in turns, `rounds` times; compare with eager in the first round."""
    inputs = arm_inputs(arms, data)
    for name in (EAGER, HAND_PACKED):
        if name in arms:  # the compiled arms have run before
            forward_backward(arms[name], inputs[name][0], precision)
    losses: dict[str, float] = {}
    found = Differences()

    def timed(name: str, index: int) -> float:
        step = _steady_step(arms[name], to_device(inputs[name][index], precision.device), precision)
        losses[name] = step.loss
        return step.seconds

    def compare(turn: int, index: int) -> None:
        if turn == 0:
            _compare(found, arms, losses, index)

    steps = {name: partial(timed, name) for name in arms}
    return Measurement.in_turns(steps, len(data), rounds, notify, compare), found


def arm_inputs(arms: Mapping[str, Arm], data: Sequence[Batch]) -> dict[str, list[Batch]]:
    """Return the batches as each arm takes them: the work of a collator is in no arm's time."""
    collators = {HAND_PACKED: pack, FLATTENED: flatten}
    return {name: [collators[name](batch) for batch in data] if name in collators else [*data] for name in arms}


def _train(
    options: UnpadOptions, arms: Mapping[str, Arm], precision: Precision, notify: Callable[[str], None]
) -> dict[str, list[list[float]]]:
    """Return the seconds of steps back to back, by arm, batch and round.

    Stock torch.compile runs on grouped batches, too.
    """
    data = draw_batches(options, torch.device("cpu"))
    inputs = arm_inputs(arms, data) | {GROUPED: grouped(data, batch_kind(options.model))}
    training = trainees({**arms, GROUPED: arms[STOCK]}, inputs)
    return train_in_turns(training, options.rounds, precision, notify)


def _compare(found: Differences, arms: Mapping[str, Arm], losses: Mapping[str, float], index: int) -> None:
    """Record the differences of each arm's loss and gradients to eager's. Raises `ParityError` for NaN."""
    for name, arm in arms.items():
        loss = abs(losses[name] - losses[EAGER]) / abs(losses[EAGER])
        gradient = max_relative_difference(arm.model, arms[EAGER].model)
        if not math.isfinite(loss + gradient):
            raise ParityError(
                f"Batch {index}: the loss in {name} is {losses[name]}, in eager {losses[EAGER]}, and the relative "
                f"difference of the gradients {gradient}; expected finite numbers. Times would mean nothing."
            )
        found.losses[name] = max(found.losses.get(name, 0.0), loss)
        found.gradients[name] = max(found.gradients.get(name, 0.0), gradient)


def _measure_unpadded(
    arms: Mapping[str, Arm], data: Sequence[Batch], options: UnpadOptions, precision: Precision
) -> Measurement:
    """Measure stock torch.compile and deepytorch on batches with nothing to strip; compiling for them is not timed."""
    compared = {name: arms[name] for name in (STOCK, DEEPYTORCH)}
    full = full_batches(data, batch_kind(options.model))
    for arm in compared.values():
        for batch in full[:1] * 2:
            forward_backward(arm, batch, precision)

    def timed(arm: Arm, index: int) -> float:
        return _steady_step(arm, full[index], precision).seconds

    steps = {name: partial(timed, arm) for name, arm in compared.items()}
    return Measurement.in_turns(steps, len(full), options.rounds)


def _peak_bytes(arm: Arm, data: Sequence[Batch], kind: Kind, precision: Precision) -> int:
    """Return the most bytes beyond the weights that one step of `arm` held, over the batches with most positions."""
    largest = sorted(data, key=lambda batch: num_positions(batch, kind), reverse=True)[:_MAX_MEMORY_BATCHES]
    peaks = []
    for batch in largest:
        arm.model.zero_grad(set_to_none=True)
        peaks.append(peak_step_bytes(partial(forward_backward, arm, batch, precision), precision.device))
    return max(peaks)
