"""The padded replay: a step run once more as eager would have run it, when a script looks at its pads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepytorch.compiler.step.kept_weights import as_then, forget, keep_for
from deepytorch.compiler.step.past import VALUES_ALONE, Past, generators_of
from deepytorch.errors import DeferredError
from deepytorch.passes.samples import Sampler


class Replay:
    """The padded replay of a call that ran packed, for a look at its pads. Must be made before the step runs.

    Args:
        eager: Runs the step operator by operator.
        inputs: The inputs of the step.
        parameters: Places of the inputs that are weights.
        sampler: Samples the weights, to find writes that leave their versions unchanged.
        written: Places of the inputs that the step writes to; the replay writes to copies with the values from before.
        draws: Whether the step draws random numbers; the replay draws the numbers that eager would have drawn.

    Attributes:
        past: The call as it began.
        places: None, as all weights may be read.
    """

    places = None

    def __init__(
        self,
        eager: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        parameters: Sequence[int],
        sampler: Sampler,
        written: Sequence[int] = (),
        draws: bool = False,
    ) -> None:
        versions, copies, trained, devices = {}, {}, [], set()
        for place, each in enumerate(inputs):
            is_tensor = isinstance(each, torch.Tensor)
            trained.append(is_tensor and each.requires_grad)
            if is_tensor and not each.is_inference():
                versions[place] = each._version
            if is_tensor and draws:
                devices.add(each.device)
        for place in written:
            copies[place] = inputs[place].detach().clone()
        self.past = Past(eager, inputs, versions, copies, generators_of(devices) if draws else ())
        self.past.trained = trained
        self._weights, self._sampler = list(map(inputs.__getitem__, parameters)), sampler
        self._samples = sampler.take(self._weights)
        self._outputs: tuple[Any, ...] | None = None
        self._values: tuple[Any, ...] | None = None  # without gradients
        self.seconds = 0.0
        keep_for(self)

    @property
    def has_run(self) -> bool:
        """Return whether the replay has run."""
        return self._outputs is not None or self._values is not None

    @torch.compiler.disable(reason="a step is replayed in eager")
    def outputs(self, name: str) -> tuple[Any, ...]:
        """Return the eager step's outputs, computed at the first call. name: of the output that is wanted.

        Under `VALUES_ALONE` they have no gradients. Raises `DeferredError` if a weight or the batch has changed.
        """
        if self._outputs is not None:
            return self._outputs
        if VALUES_ALONE.get():
            if self._values is None:
                self._values = self._run(name, gradients=False)
            return self._values
        self._outputs, self._values = self._run(name, gradients=True), None
        forget(self)
        self.past, self._weights = Past(self.past.eager, (), {}, {}), []
        return self._outputs

    def _run(self, name: str, *, gradients: bool) -> tuple[Any, ...]:
        past = self.past
        self._check(past, name)
        started = time.perf_counter()
        with past.as_it_was(), past.trained_as_it_was(), contextlib.nullcontext() if gradients else torch.no_grad():
            given = list(past.inputs)
            for place, copy in past.copies.items():  # the run may write into a copy, and there may be another run
                given[place] = as_then(past, place) if place in past.kept_places else copy.clone()
            outputs = tuple(past.eager(*given))
        self.seconds += time.perf_counter() - started
        return outputs

    def rewind(self) -> None:
        """Set the random generators to their states at the begin of the step."""
        self.past.rewind()

    def _check(self, past: Past, name: str) -> None:
        for place in past.changed():
            if place not in past.copies:
                given = past.inputs[place]
                kind = "a weight" if isinstance(given, torch.nn.Parameter) else "the batch or a buffer"
                raise _changed(name, kind, tuple(given.shape))
        copies = {id(past.inputs[place]): copy for place, copy in past.copies.items()}
        then = [copies.get(id(each), each) for each in self._weights]
        for weight in self._sampler.changed(then, self._samples, ()):
            raise _changed(name, "a weight", tuple(weight.shape))


def _changed(name: str, kind: str, shape: tuple[int, ...]) -> DeferredError:
    return DeferredError(
        f"padded positions of {name!r} are computed when they are first looked at, and {kind} of shape {shape} has "
        "changed since the step; expected the first look before that. Look at them before optimizer.step() or before "
        "the batch is overwritten, look at real positions only, or compile with "
        "torch.compile(..., options={'defer_outputs': False}) (deepytorch.configure(options=...) under the import)"
    )
