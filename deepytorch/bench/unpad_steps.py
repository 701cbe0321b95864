"""The measuring of `deepytorch bench unpad`, in one process: see `unpad` for its options, rows and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import deepytorch
from deepytorch.bench.back_to_back import train_in_turns, trainees
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.hand_packed import ATTENTION_NAME, hand_packed_arm, pack, register_attention
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.rivals import FLASH, flatten, flattened_arm, flattened_unavailable, grouped
from deepytorch.bench.training_step import (
    Arm,
    Batch,
    Precision,
    Step,
    compiled_arm,
    empty_compile_caches,
    forward_backward,
    start_compiler,
    to_device,
)
from deepytorch.bench.unpad import EAGER, FLATTENED, GROUPED, HAND_PACKED, OURS, PRECISIONS, STOCK, UnpadJob
from deepytorch.data import IGNORE_INDEX, num_labels, num_positions, num_tokens, text_batches
from deepytorch.data.batching import Kind
from deepytorch.errors import ParityError
from deepytorch.switch import SWITCH

Job = UnpadJob
Notify = Callable[[str], None]
_NUM_WARM_BATCHES = 3  # stock torch.compile is stable after three compiles
_MAX_MEMORY_BATCHES = 4  # the profiler that counts bytes is slow; the batches with the most positions decide


def run(job: UnpadJob, turns: Turns) -> dict[str, Any]:
    """Measure as the one job of a process, whose setups say themselves what is compiled."""
    SWITCH.enabled = False
    return measure(job, partial(turns.say, DOING))


def measure(job: UnpadJob, notify: Notify = lambda text: None) -> dict[str, Any]:
    """Measure every arm on the same batches and weights; `notify` is told the current activity.

    1. Each compiled arm runs all batches once, alone, from empty compile caches. Its compile time is the time of the
       steps that compile minus the steady times of the same batches. Both compilers were started before.
    2. Every batch goes through every arm, the order rotated from batch to batch and round to round, so that a change
       of the machine's speed affects all arms alike. A step is zeroing the gradients, forward and backward; packing by
       hand is not in the time of the hand-packed arm, since a collator would do it.
    3. Losses and gradients of the first round are compared with eager's. Weights do not change in it.
    4. Back to back, step 2 is for that comparison alone. Then every arm trains with AdamW on batches that come from the
       host, and passes over all batches take turns; see `back_to_back`. Rivals run where they are installed (`rivals`).

    Returns what `unpad.rows_of` takes: `seconds[arm][batch]`, a list of the rounds; figures by arm; and shared ones.
    Raises `ConfigError`, `DataError`, and `ParityError` when a loss or gradient is not finite.
    """
    options = job.options
    precision = Precision.parse(options.device, *PRECISIONS[options.precision])
    notify("Preparing data and models")
    data = draw_batches(job, precision.device)
    not_run = rivals_not_run(job, precision)
    arms = build_arms(job, precision)
    if FLATTENED not in not_run:
        model = _build(job, precision, FLASH)
        arms[FLATTENED] = flattened_arm(FLATTENED, model, job.model, job.stock_backend)
    for backend in (job.stock_backend, job.backend):
        start_compiler(backend, precision)

    def first_pass(name: str) -> list[Step]:
        steps = []
        for number, batch in enumerate(data, 1):
            notify(f"Compiling {name}, from empty caches: batch {number} of {len(data)}")
            steps.append(forward_backward(arms[name], batch, precision))
        return steps

    with empty_compile_caches():
        first_stock = first_pass(STOCK)
    with empty_compile_caches():
        deepytorch.report(reset=True)
        first_ours = first_pass(OURS)
        for batch in data[:_NUM_WARM_BATCHES]:
            forward_backward(arms[STOCK], batch, precision)
        compared, differences = _measure(arms, data, 1 if options.trains else options.rounds, precision, notify)
        measured = Measurement(_train(job, arms, precision, notify)) if options.trains else compared
        counts = deepytorch.report().to_json()
        notify("Measuring batches without padding")
        unpadded = _measure_unpadded(arms, data, job, precision)
        notify("Measuring memory")
        kind = batch_kind(job.model)
        peaks = {name: _peak_bytes(arms[name], data, kind, precision) / 2**20 for name in (EAGER, STOCK, OURS)}
    tokens = sum(num_tokens(batch, kind) for batch in data)
    positions = sum(num_positions(batch, kind) for batch in data)
    reasons = "; ".join(f"{name}, {reason}" for name, reason in not_run.items())
    return {
        "seconds": measured.seconds,
        "tokens": tokens,
        "loss_rel_diff": differences.losses,
        "grad_rel_diff": differences.gradients,
        "compile_s": {
            STOCK: _compile_seconds(first_stock, compared.steady(STOCK)),
            OURS: _compile_seconds(first_ours, compared.steady(OURS)),
        },
        "peak_mb": peaks,
        "shared": {
            "real_token_fraction": tokens / positions,
            "token_ceiling": positions / tokens,
            "labelled_fraction": sum(map(num_labels, data)) / tokens,
            "no_padding_ratio": unpadded.ratio(STOCK),
            "host_ms": counts["host_ms_per_step"],
            **{name: counts[name] for name in ("recompiles", "steps_packed", "steps_padded")},
        },
        "texts": {
            "device": precision.device_name(),
            "timing": "back to back" if options.trains else "one by one",
            **({"not measured": reasons} if reasons else {}),
        },
    }


@dataclass(slots=True)
class Differences:
    """The largest relative differences to eager over all batches, by other arm: of losses, and of gradients."""

    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


def rivals_not_run(job: UnpadJob, precision: Precision) -> dict[str, str]:
    """Return the arms that are not measured, each with the reason."""
    kind, loss = batch_kind(job.model), job.options.loss
    found = {}
    if kind != "causal" or loss != "model":
        found[HAND_PACKED] = "a row is packed by hand for decoders with a loss of their own"
    reason = flattened_unavailable(kind, loss, job.model, precision)
    if reason is not None:
        found[FLATTENED] = reason
    if not job.options.trains:
        found[GROUPED] = "batches of other rows compare over whole passes, back to back"
    return found


def _build(job: UnpadJob, precision: Precision, attn_implementation: str = "sdpa") -> nn.Module:
    """Return the model, with weights drawn anew but always equal."""
    vocab_size = job.options.vocab_size
    made: nn.Module = build_model(
        job.model, job.options.size, vocab_size=vocab_size, attn_implementation=attn_implementation
    )
    return made.to(precision.device, precision.weights)


def build_arms(job: UnpadJob, precision: Precision) -> dict[str, Arm]:
    """Return the arms by name, each with a copy of the same weights."""
    model, loss = partial(_build, job, precision), job.options.loss
    arms = [
        compiled_arm(EAGER, model(), None, loss),
        compiled_arm(STOCK, model(), job.stock_backend, loss),
        compiled_arm(OURS, model(), job.backend, loss),
    ]
    if batch_kind(job.model) == "causal" and loss == "model":
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


def draw_batches(job: UnpadJob, device: torch.device) -> list[Batch]:
    """Return the batches that a job asks for, on `device`."""
    options = job.options
    drawn = text_batches(
        options.data,
        options.vocab_size,
        batch_size=options.batch_size,
        max_length=job.max_length,
        labels=options.labels,
        kind=batch_kind(job.model),
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
    arms: Mapping[str, Arm], data: Sequence[Batch], rounds: int, precision: Precision, notify: Notify
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
    job: UnpadJob, arms: Mapping[str, Arm], precision: Precision, notify: Notify
) -> dict[str, list[list[float]]]:
    """Return the seconds of steps back to back, by arm, batch and round.

    Stock torch.compile runs on grouped batches, too.
    """
    data = draw_batches(job, torch.device("cpu"))
    inputs = arm_inputs(arms, data) | {GROUPED: grouped(data, batch_kind(job.model))}
    training = trainees({**arms, GROUPED: arms[STOCK]}, inputs)
    return train_in_turns(training, job.options.rounds, precision, notify)


def _compare(found: Differences, arms: Mapping[str, Arm], losses: Mapping[str, float], index: int) -> None:
    """Record the differences of each arm's loss and gradients to eager's. Raises `ParityError` for NaN."""
    for name, arm in arms.items():
        if name == EAGER:
            continue
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
    arms: Mapping[str, Arm], data: Sequence[Batch], job: UnpadJob, precision: Precision
) -> Measurement:
    """Measure stock torch.compile and deepytorch on batches with nothing to strip; compiling for them is not timed."""
    compared = {name: arms[name] for name in (STOCK, OURS)}
    full = full_batches(data, batch_kind(job.model))
    for arm in compared.values():
        for batch in full[:1] * 2:
            forward_backward(arm, batch, precision)

    def timed(arm: Arm, index: int) -> float:
        return _steady_step(arm, full[index], precision).seconds

    steps = {name: partial(timed, arm) for name, arm in compared.items()}
    return Measurement.in_turns(steps, len(full), job.options.rounds)


def _peak_bytes(arm: Arm, data: Sequence[Batch], kind: Kind, precision: Precision) -> int:
    """Return the most bytes beyond the weights that one step of `arm` held, over the batches with most positions."""
    largest = sorted(data, key=lambda batch: num_positions(batch, kind), reverse=True)[:_MAX_MEMORY_BATCHES]
    peaks = []
    for batch in largest:
        arm.model.zero_grad(set_to_none=True)
        peaks.append(peak_step_bytes(partial(forward_backward, arm, batch, precision), precision.device))
    return max(peaks)
