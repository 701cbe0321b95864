"""The setups of a comparison in one process: a model, run in different ways, one training step at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deepytorch.bench.memory import peak_step_bytes
from deepytorch.bench.options import dtype_name
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import lookup_backend, reset_dynamo

Batch = dict[str, Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The device and dtype of steps. A dtype below that of the weights is reached by autocast, as in Trainer."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs: autocast to `dtype`, or nothing if weights have it."""
        if self.dtype == self.weights:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished all its work, so that the clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def device_name(self) -> str:
        """Return the GPU's name, or the kind of another device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    @staticmethod
    def parse(device: str, dtype: str, weights: str = "fp32") -> Precision:
        """Return the precision that the command line's texts name. Raises `ConfigError`."""
        dtype, weights = dtype_name(dtype), dtype_name(weights)
        if weights not in ("fp32", dtype):
            raise ConfigError(f"weights is {weights} and dtype {dtype}, expected weights in fp32 or in the same dtype.")
        try:
            parsed = torch.device(device)
            torch.empty(0, device=parsed)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f'The device "{device}" cannot be used: {reason} `deepytorch doctor` lists the devices that there are.'
            ) from error
        return Precision(parsed, DTYPES[dtype], DTYPES[weights])


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """One way to run a model. `loss` maps a batch to a scalar; the gradients arrive in `model`'s own parameters."""

    name: str
    model: nn.Module
    loss: Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one forward and backward: the loss as a number, the seconds, and whether anything compiled."""

    loss: float
    seconds: float
    compiled: bool


def compiled_setup(name: str, model: nn.Module, backend: str | None, loss: str = "model") -> ModelSetup:
    """Return a setup that runs `model` through `torch.compile(backend=...)`, or unchanged when `backend` is None.

    loss: the loss that is trained on, one of `unpad.LOSSES`.
    """
    callable_model = model if backend is None else torch.compile(model, backend=backend)
    if loss == "model":
        return ModelSetup(name, model, lambda batch: callable_model(**batch).loss)

    def outside(batch: Batch) -> Tensor:
        logits = callable_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"] if loss == "outside" else batch["input_ids"]
        return cross_entropy(logits[:, :-1].float().reshape(-1, logits.shape[-1]), targets[:, 1:].reshape(-1))

    return ModelSetup(name, model, outside)


def forward_backward(setup: ModelSetup, batch: Batch, precision: Precision) -> Step:
    """Run one step and leave the gradients in `setup.model`; timed are zeroing the gradients, forward and backward."""
    precision.synchronize()
    compilations = num_compilations()
    start = time.perf_counter()
    setup.model.zero_grad(set_to_none=True)
    with precision.autocast():
        loss = setup.loss(batch)
    loss.backward()
    precision.synchronize()
    seconds = time.perf_counter() - start
    return Step(float(loss.detach()), seconds, compiled=num_compilations() > compilations)


def peak_bytes_of(setup: ModelSetup, batch: Batch, precision: Precision) -> int:
    """Return the most bytes that one step held at once, beyond the model's weights."""
    setup.model.zero_grad(set_to_none=True)
    return peak_step_bytes(partial(forward_backward, setup, batch, precision), precision.device)


def num_compilations() -> int:
    """Return a count that grows whenever Dynamo, AOTAutograd or Inductor compiles, now or lazily in a backward.

    The count is read from torch's own timers, so that a slow step of a busy machine is not taken for one that compiled.
    """
    from deepytorch.torch_internals import compilation_time_metrics

    return sum(map(len, compilation_time_metrics.values()))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` with its tensors on `device`."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


@contextlib.contextmanager
def empty_compile_caches() -> Iterator[None]:
    """Start without compiled code, in memory or on disk, so that everything inside the block is compiled anew.

    Inductor and Triton write to a temporary folder, which is removed at the end; code that was loaded stays usable.
    """
    from deepytorch.torch_internals import clear_inductor_caches

    reset_dynamo()
    clear_inductor_caches()
    with tempfile.TemporaryDirectory(prefix="deepytorch-bench-", ignore_cleanup_errors=True) as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        with mock.patch.dict(os.environ, caches):
            yield


def start_compiler(backend: str, precision: Precision) -> None:
    """Compile something small, so that imports and worker processes do not count as the compile time of a setup.

    deepytorch lowers through Inductor: loading it and starting Inductor is enough, and its counters stay untouched.
    """
    lookup_backend(backend)
    with empty_compile_caches():
        starter = "inductor" if backend == "deepytorch" else backend
        layer = torch.compile(nn.Linear(4, 4, device=precision.device), backend=starter)
        layer(torch.ones(2, 4, device=precision.device)).sum().backward()
