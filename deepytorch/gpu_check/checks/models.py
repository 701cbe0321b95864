"""Small models that train as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch import paused
from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.training_step import DTYPES, Batch, ModelSetup, Precision, to_device
from deepytorch.data import text_batches
from deepytorch.gpu_check.nearness import as_near
from deepytorch.gpu_check.outcome import Check
from deepytorch.torch_internals import reset_dynamo

MODELS = ("llama", "bert", "t5")
COMPILES_S = 180.0  # the deadline of a check with a model that Inductor compiles
COMPILED = partial(torch.compile, backend="deepytorch")


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for model in MODELS:
        for dtype in ("fp32", "bf16"):
            run = partial(trains_as_eager, device, model, dtype)
            yield Check(f"parity: {model}", f"{dtype}, Inductor", run, deadline_s=COMPILES_S, expected_s=40.0)


def trains_as_eager(device: torch.device, model: str, dtype: str) -> str:
    """Compare losses and final weights of three steps of SGD: in float32, in `dtype`, and in `dtype` by deepytorch."""
    start = start_of(model).to(device)
    return compared(trainee_of(start, few_batches(model, device, 3), COMPILED), dtype)


def start_of(model: str) -> nn.Module:
    """Return a small model in float32 on the CPU, always the same, and forget what was compiled."""
    reset_dynamo()
    made: nn.Module = build_model(model, "tiny", vocab_size=512, seed=0)
    return made


def few_batches(model: str, device: torch.device, steps: int, size: int = 8) -> list[dict[str, Tensor]]:
    """Return batches of `size` rows on a device."""
    drawn = text_batches(None, 512, batch_size=size, max_length=256, kind=batch_kind(model), steps=steps)
    return [to_device(batch, device) for batch in drawn]


Compile = Callable[[nn.Module], Callable[..., Any]]


def compared(trainee: Trainee, dtype: str) -> str:
    """Train, and copies of the model in eager, in float32 and in `dtype`; compare as `as_near` does."""
    start, data = copy.deepcopy(trainee.setup.model), trainee.batches
    with paused():
        exact = _trained(trainee_of(copy.deepcopy(start), data, None), torch.float32)
        eager = _trained(trainee_of(copy.deepcopy(start), data, None), DTYPES[dtype])
    ours = _trained(trainee, DTYPES[dtype])
    return as_near(("losses", "change of the weights"), exact, eager, ours, DTYPES[dtype])


def _trained(trainee: Trainee, dtype: torch.dtype) -> list[Tensor]:
    model = trainee.setup.model
    before = [each.detach().clone() for each in model.parameters()]
    precision = Precision(trainee.batches[0]["input_ids"].device, dtype)
    losses = [trainee.step(batch, precision).float() for batch in trainee.batches]
    change = [(now.detach() - then).flatten() for now, then in zip(model.parameters(), before, strict=True)]
    return [torch.stack(losses), torch.cat(change)]


def trainee_of(model: nn.Module, data: Sequence[Batch], compiled: Compile | None) -> Trainee:
    """Return a model in training with SGD. compiled: None: in eager."""
    call = model if compiled is None else compiled(model)
    built = ModelSetup("", model, lambda batch: call(**batch).loss)
    return Trainee(built, torch.optim.SGD(model.parameters(), lr=0.05), data)
