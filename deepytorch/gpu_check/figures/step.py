"""A packed training step of a Llama of about a billion parameters in bf16, at lengths of text, beside its rivals.

Each setup has a process: what it compiles is compiled beside other checks, from empty caches, on a few short rows.
Steps are then timed back to back with AdamW, alone, as in `bench unpad`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from deepytorch import paused
from deepytorch.bench.back_to_back import Trainee, trainees
from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.models import SIZES, build_model
from deepytorch.bench.rivals import flatten, grouped, with_kernels
from deepytorch.bench.roofline import Gpu, Shape, Work, step_of
from deepytorch.bench.training_step import (
    Batch,
    ModelSetup,
    Precision,
    compiled_setup,
    empty_compile_caches,
    forward_backward,
    start_compiler,
    to_device,
)
from deepytorch.compiler.report import LEDGER
from deepytorch.data import IGNORE_INDEX, PAD_ID, num_tokens, text_batches
from deepytorch.gpu_check.figures.timing import OURS, memory_may_not_suffice, require_gpu, timed
from deepytorch.gpu_check.outcome import Check, Failed, Found
from deepytorch.torch_internals import maybe_mark_dynamic

_SUBJECT = "packed step"
_INDUCTOR, _EAGER, _LIGER, _FLATTENED = "Inductor", "eager", "Liger", "flattened, flash-attn, Liger, Inductor"
_BY_LENGTH = "group_by_length"
_BATCHES = {8: 6, 32: 3}  # batches that are timed, by their rows
_ROUNDS = 2
_MORE = 8  # steps until one has to be packed
_LOSS_OFF = 2e-2  # relative, of the first loss, from eager's
_ADAMW_BYTES = 14  # a parameter: weight, gradient and moments read, weight and moments written, all in bf16
_MADE: dict[str, ModelSetup] = {}  # by setup, in this process


@dataclass(frozen=True)
class Scale:
    """The model and its batches: what a GPU is for, and what tries the same on a CPU."""

    size: str
    vocab_size: int
    max_length: int
    rows: dict[int, int]  # what is measured for a batch of so many
    batches: dict[int, int]


def scale_of(device: torch.device) -> Scale:
    """Return the scale of a device."""
    if device.type == "cuda":
        return Scale("large", 128_256, 1024, {8: 8, 32: 32}, _BATCHES)
    return Scale("tiny", 512, 96, {8: 4, 32: 6}, {8: 2, 32: 2})


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    compiling_s = {OURS: 110.0, _INDUCTOR: 80.0, _EAGER: 15.0, _LIGER: 20.0, _FLATTENED: 90.0}
    for setup, expected_s in compiling_s.items():
        group = f"{_SUBJECT}: {setup}"
        needs = {_LIGER: ("liger_kernel",), _FLATTENED: ("flash_attn", "liger_kernel")}.get(setup, ())
        run: Callable[[], str | Found] = partial(prepare, device, setup)
        yield Check(group, "first step", run, False, deadline_s=280.0, expected_s=expected_s, needs=needs)
        for rows in _BATCHES:
            orders = ("", _BY_LENGTH) if setup == _INDUCTOR else ("",)
            for order in orders:
                name = f"batch {rows}" + (f", {order}" if order else "")
                run = partial(timed_step, device, setup, rows, order)
                yield Check(group, name, run, False, is_timed=True, deadline_s=120.0, expected_s=6.0, needs=needs)


def prepare(device: torch.device, setup: str) -> Found:
    """Compile, and see that the first loss is near eager's. The figure is the time until a step has run that way."""
    scale, precision = scale_of(device), _precision(device)
    batch = to_device(_few_short_rows(scale), device)
    with memory_may_not_suffice(setup):
        if setup not in (_EAGER, _LIGER):
            start_compiler("deepytorch" if setup == OURS else "inductor", precision)
        LEDGER.forget()
        with empty_compile_caches():
            began = time.perf_counter()
            built = _built(device, setup)
            built_s = time.perf_counter() - began
            loss = _first_step(built, batch, precision, setup)
            for _ in range(_MORE if setup == OURS else 0):  # where code is compiled in the background
                if LEDGER.report().total("steps_packed"):
                    break
                loss = forward_backward(built, batch, precision).loss
            first_s = time.perf_counter() - began - built_s
        with paused(), torch.no_grad():
            eager = float(_plain(device, built, setup)(**batch).loss)
    if not abs(loss - eager) <= _LOSS_OFF * eager:
        raise Failed(f"the first loss is {loss:.5g}, and {eager:.5g} in eager")
    packed = LEDGER.report().total("steps_packed")
    if setup == OURS and not packed:
        because = {reason for region in LEDGER.report().regions for reason in region.padded_because}
        raise Failed(f"no step was packed: {'; '.join(map(str, because)) or 'no reason is known'}")
    _free(device)
    said = f"after {first_s:.1f} s{', packed' if packed else ''}; loss {loss:.5g}, {eager:.5g} in eager"
    return Found(said, {"first_step_s": first_s, "loss": loss, "eager_loss": eager})


def timed_step(device: torch.device, setup: str, rows: int, order: str) -> Found:
    """Time steps back to back; peak_mb is that of forward and backward, beyond weights and optimizer."""
    scale, precision = scale_of(device), _precision(device)
    data = _drawn(scale, scale.rows[rows], scale.batches[rows])
    lengths = [batch["attention_mask"].sum(1).tolist() for batch in data]
    if order == _BY_LENGTH:
        data = grouped(data, "causal")
    given = [flatten(batch) for batch in data] if setup == _FLATTENED else data
    with memory_may_not_suffice(setup):
        built = _built(device, setup)
        trainee = trainees({setup: built}, {setup: given})[setup]
        seconds = _steady(trainee, precision)
        largest = max(given, key=lambda batch: batch["input_ids"].numel())
        built.model.zero_grad(set_to_none=True)
        peak = peak_step_bytes(partial(forward_backward, built, to_device(largest, device), precision), device)
    built.model.zero_grad(set_to_none=True)
    del trainee
    _free(device)
    tokens = sum(num_tokens(batch, "causal") for batch in data)
    rate = {"tokens_per_s": tokens / sum(seconds), "peak_mb": peak / 2**20}
    limit = partial(_limit_s, lengths)
    return timed(device, 1e3 * sum(seconds) / len(seconds), limit_s=limit, **rate)


def _first_step(built: ModelSetup, batch: Batch, precision: Precision, setup: str) -> float:
    if setup == _INDUCTOR:  # as batches of other sizes make it, without a compile for this one alone
        for value in batch.values():
            maybe_mark_dynamic(value, [0, 1])
    if setup == _FLATTENED:
        batch = to_device(flatten(batch), precision.device)
    return forward_backward(built, batch, precision).loss


def _steady(trainee: Trainee, precision: Precision) -> list[float]:
    """Return the least over passes of each batch's seconds, behind a pass that is not timed."""
    trainee.train(precision)
    passes = [trainee.train(precision) for _ in range(_ROUNDS)]
    return [min(each) for each in zip(*passes, strict=True)]


def _built(device: torch.device, setup: str) -> ModelSetup:
    if setup not in _MADE:
        _MADE.clear()
        _MADE[setup] = _build(device, setup)
    return _MADE[setup]


def _build(device: torch.device, setup: str) -> ModelSetup:
    if setup in (_LIGER, _FLATTENED):
        require_gpu(device)
    model = with_kernels(_model(device), {_LIGER: "liger", _FLATTENED: "flattened"}.get(setup, ""), "llama")
    return compiled_setup(setup, model, {OURS: "deepytorch", _INDUCTOR: "inductor", _FLATTENED: "inductor"}.get(setup))


def _model(device: torch.device) -> nn.Module:
    scale = scale_of(device)
    with torch.device(device):  # weights of a billion are drawn there in a moment
        made: nn.Module = build_model("llama", scale.size, vocab_size=scale.vocab_size)
    return made.to(torch.bfloat16)


def _plain(device: torch.device, built: ModelSetup, setup: str) -> nn.Module:
    """Return the model in eager; one with kernels of others is built anew without them."""
    return _model(device) if setup in (_LIGER, _FLATTENED) else built.model


def _few_short_rows(scale: Scale) -> Batch:
    """Return four rows cut to 96 positions, a half, a third and a quarter of it: little memory, and half of it pads."""
    [batch] = _drawn(scale, 4, 1)
    cut = {name: value[:, :96].clone() for name, value in batch.items()}
    length = cut["input_ids"].shape[1]
    limits = length // torch.arange(1, 5)
    pads = torch.arange(length)[None] >= limits[:, None]
    for name, value in (("input_ids", PAD_ID), ("attention_mask", 0), ("labels", IGNORE_INDEX)):
        cut[name][pads] = value
    return cut


def _drawn(scale: Scale, rows: int, steps: int) -> list[Batch]:
    """Return batches on the host, of which every token is a label."""
    options = {"batch_size": rows, "max_length": scale.max_length, "labels": "all", "kind": "causal", "steps": steps}
    return list(text_batches(None, min(8192, scale.vocab_size), **options))


def _precision(device: torch.device) -> Precision:
    return Precision(device, torch.bfloat16, torch.bfloat16)


def _free(device: torch.device) -> None:
    """Give memory back to the processes beside."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _limit_s(lengths: Sequence[Sequence[int]], gpu: Gpu) -> float:
    """Return the least mean time of packed steps over rows of these lengths."""
    of = SIZES["large"]
    heads, dim = of.num_heads, of.hidden_size // of.num_heads
    shape = Shape("Llama", of.hidden_size, of.num_layers, heads, heads, dim, of.intermediate_size, 128_256)
    steps = [step_of(shape, each, packed=True) for each in lengths]
    optimizer = Work("optimizer", 0.0, float(_ADAMW_BYTES * shape.parameters), 1)
    return sum(replace(step, optimizer=optimizer).seconds(gpu) for step in steps) / len(steps)
