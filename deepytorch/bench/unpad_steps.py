"""The measuring of `deepytorch bench unpad`, in one process: see `unpad` for its options, rows and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import deepytorch
from deepytorch.bench.back_to_back import train_in_turns, trainees
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.rivals import (
    OWN_ATTENTION,
    flatten,
    flattened_unavailable,
    grouped,
    register_attention,
    with_kernels,
)
from deepytorch.bench.training_step import (
    Batch,
    ModelSetup,
    Precision,
    Step,
    compiled_setup,
    empty_compile_caches,
    forward_backward,
    peak_bytes_of,
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
    """Measure every setup on the same batches and weights; `notify` is told the current activity.

    1. Each compiled setup runs all batches once, alone, from empty compile caches. Its compile time is the time of the
       steps that compile minus the steady times of the same batches. Both compilers were started before.
    2. Every batch goes through every setup, the order rotated from batch to batch and round to round, so that a change
       of the machine's speed affects all setups alike. A step is zeroing the gradients, forward and backward; packing
       by hand is not in the time of the hand-packed setup, since a collator would do it.
    3. Losses and gradients of the first round are compared with eager's. Weights do not change in it.
    4. Back to back, step 2 is for that comparison alone. Then every setup trains with AdamW on batches that come from
       the host, and passes over all batches take turns; see `back_to_back`. Rivals run where they are installed:
       `rivals`.

    Returns what `unpad.rows_of` takes: `seconds[setup][batch]`, a list of the rounds; figures by setup; shared ones.
    Raises `ConfigError`, `DataError`, and `ParityError` when a loss or gradient is not finite.
    """
    options = job.options
    precision = Precision.parse(options.device, *PRECISIONS[options.precision])
    notify("Preparing data and models")
    data = draw_batches(job, precision.device)
    not_run = rivals_not_run(job, precision)
    setups = build_setups(job, precision)
    for backend in (job.stock_backend, job.backend):
        start_compiler(backend, precision)

    def first_pass(name: str) -> list[Step]:
        steps = []
        for number, batch in enumerate(data, 1):
            notify(f"Compiling {name}, from empty caches: batch {number} of {len(data)}")
            steps.append(forward_backward(setups[name], batch, precision))
        return steps

    with empty_compile_caches():
        first_stock = first_pass(STOCK)
    with empty_compile_caches():
        deepytorch.report(reset=True)
        first_ours = first_pass(OURS)
        for batch in data[:_NUM_WARM_BATCHES]:
            forward_backward(setups[STOCK], batch, precision)
        compared, differences = _compared(setups, data, 1 if options.trains else options.rounds, precision, notify)
        measured = Measurement(_train(job, setups, precision, notify)) if options.trains else compared
        counts = deepytorch.report().to_json()
        notify("Measuring batches without padding")
        unpadded = _measure_unpadded(setups, data, job, precision)
        notify("Measuring memory")
        kind = batch_kind(job.model)
        peaks = {name: _peak_bytes(setups[name], data, kind, precision) / 2**20 for name in (EAGER, STOCK, OURS)}
    tokens = sum(num_tokens(batch, kind) for batch in data)
    positions = sum(num_positions(batch, kind) for batch in data)
    reasons = "; ".join(f"{name}, {reason}" for name, reason in not_run.items())
    return {
        "seconds": measured.seconds,
        "tokens": tokens,
        **differences,
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


def rivals_not_run(job: UnpadJob, precision: Precision) -> dict[str, str]:
    """Return the setups that are not measured, each with the reason."""
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


def build_setups(job: UnpadJob, precision: Precision) -> dict[str, ModelSetup]:
    """Return the setups that can run, by name, each with a model of its own, whose weights are always equal."""
    options, not_run = job.options, rivals_not_run(job, precision)

    def model(attention: str = "sdpa") -> nn.Module:
        made: nn.Module = build_model(
            job.model, options.size, vocab_size=options.vocab_size, attn_implementation=attention
        )
        return made.to(precision.device, precision.weights)

    setups = [
        compiled_setup(EAGER, model(), None, options.loss),
        compiled_setup(STOCK, model(), job.stock_backend, options.loss),
        compiled_setup(OURS, model(), job.backend, options.loss),
    ]
    if HAND_PACKED not in not_run:
        register_attention()
        setups.append(compiled_setup(HAND_PACKED, model(OWN_ATTENTION), None))
    if FLATTENED not in not_run:
        with_liger = with_kernels(model(), "flattened", job.model)
        setups.append(compiled_setup(FLATTENED, with_liger, job.stock_backend))
    return {setup.name: setup for setup in setups}


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


def _steady_step(setup: ModelSetup, batch: Batch, precision: Precision) -> Step:
    """Run one step, and once more if it compiled: compile times are those of the first passes, not part of a ratio."""
    step = forward_backward(setup, batch, precision)
    return forward_backward(setup, batch, precision) if step.compiled else step


def _compile_seconds(first: Sequence[Step], steady: Sequence[float]) -> float:
    """Return the time of the steps that compiled, beyond the steady time of the same batches."""
    return sum(max(0.0, step.seconds - later) for step, later in zip(first, steady, strict=True) if step.compiled)


def _compared(
    setups: Mapping[str, ModelSetup], data: Sequence[Batch], rounds: int, precision: Precision, notify: Notify
) -> tuple[Measurement, dict[str, dict[str, float]]]:
    """Run every batch through every setup, in turns, `rounds` times; compare with eager in the first round.

    Returns with the times the largest relative differences over all batches, of losses and of gradients, by setup.
    """
    inputs = setup_inputs(setups, data)
    inputs = {name: [to_device(batch, precision.device) for batch in batches] for name, batches in inputs.items()}
    for name in (EAGER, HAND_PACKED):
        if name in setups:  # the compiled setups have run before
            forward_backward(setups[name], inputs[name][0], precision)
    found: dict[str, dict[str, float]] = {"loss_rel_diff": {}, "grad_rel_diff": {}}
    return _in_turns(setups, inputs, rounds, precision, notify, partial(_compare, found, setups)), found


def _in_turns(
    setups: Mapping[str, ModelSetup],
    inputs: Mapping[str, Sequence[Batch]],
    rounds: int,
    precision: Precision,
    notify: Notify = lambda text: None,
    compare: Callable[[Mapping[str, float], int], None] = lambda losses, index: None,
) -> Measurement:
    """Time steps in turns. compare: gets the losses of a batch by setup, and its number, in the first round."""
    losses: dict[str, float] = {}

    def timed(name: str, index: int) -> float:
        step = _steady_step(setups[name], inputs[name][index], precision)
        losses[name] = step.loss
        return step.seconds

    def after_batch(turn: int, index: int) -> None:
        if turn == 0:
            compare(losses, index)

    steps = {name: partial(timed, name) for name in setups}
    return Measurement.in_turns(steps, len(inputs[OURS]), rounds, notify, after_batch)


def setup_inputs(setups: Mapping[str, ModelSetup], data: Sequence[Batch]) -> dict[str, list[Batch]]:
    """Return the batches as each setup takes them: the work of a collator is in no setup's time."""
    return {name: [flatten(batch) if name in (HAND_PACKED, FLATTENED) else batch for batch in data] for name in setups}


def _train(
    job: UnpadJob, setups: Mapping[str, ModelSetup], precision: Precision, notify: Notify
) -> dict[str, list[list[float]]]:
    """Return the seconds of steps back to back, by setup, batch and round.

    Stock torch.compile runs on grouped batches, too.
    """
    data = draw_batches(job, torch.device("cpu"))
    inputs = setup_inputs(setups, data) | {GROUPED: grouped(data, batch_kind(job.model))}
    training = trainees({**setups, GROUPED: setups[STOCK]}, inputs)
    return train_in_turns(training, job.options.rounds, precision, notify)


def _compare(
    found: Mapping[str, dict[str, float]], setups: Mapping[str, ModelSetup], losses: Mapping[str, float], index: int
) -> None:
    """Record the differences of each setup's loss and gradients to eager's. Raises `ParityError` for NaN."""
    for name, setup in setups.items():
        if name == EAGER:
            continue
        loss = abs(losses[name] - losses[EAGER]) / abs(losses[EAGER])
        gradient = max_relative_difference(setup.model, setups[EAGER].model)
        if not math.isfinite(loss + gradient):
            raise ParityError(
                f"Batch {index}: the loss in {name} is {losses[name]}, in eager {losses[EAGER]}, and the relative "
                f"difference of the gradients {gradient}; expected finite numbers. Times would mean nothing."
            )
        for what, difference in (("loss_rel_diff", loss), ("grad_rel_diff", gradient)):
            found[what][name] = max(found[what].get(name, 0.0), difference)


def _measure_unpadded(
    setups: Mapping[str, ModelSetup], data: Sequence[Batch], job: UnpadJob, precision: Precision
) -> Measurement:
    """Measure stock torch.compile and deepytorch on batches with nothing to strip; compiling for them is not timed."""
    compared = {name: setups[name] for name in (STOCK, OURS)}
    full = full_batches(data, batch_kind(job.model))
    for setup in compared.values():
        for batch in full[:1] * 2:
            forward_backward(setup, batch, precision)
    return _in_turns(compared, dict.fromkeys(compared, full), job.options.rounds, precision)


def _peak_bytes(setup: ModelSetup, data: Sequence[Batch], kind: Kind, precision: Precision) -> int:
    """Return the most bytes beyond the weights that one step of `setup` held, of the batches with most positions."""
    largest = sorted(data, key=lambda batch: num_positions(batch, kind), reverse=True)[:_MAX_MEMORY_BATCHES]
    return max(peak_bytes_of(setup, batch, precision) for batch in largest)
