"""A step that ran packed, kept for outputs that are computed later: by its padded replay, or from its weights."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from deepytorch.compiler.step.kept_weights import forget, keep_for, storage_of
from deepytorch.compiler.step.past import Past, generators_of, version_of
from deepytorch.errors import DeferredError
from deepytorch.passes.samples import Sampler, same_bits, sample


class Replay:
    """The past of a call that ran packed. Must be made before the call runs.

    A weight that an optimizer changes is copied before (`kept_weights`). A weight or a batch that changes in any other
    way is noticed by its version and by samples of its values. A use then raises `DeferredError`, and never gives other
    numbers.

    Args:
        eager: Runs the step operator by operator.
        inputs: The inputs of the step.
        parameters: Places of the inputs that are weights.
        sampler: Samples the weights, to find writes that leave their versions unchanged.
        written: Places of the inputs that the step writes to; the replay writes to copies with the values from before.
        draws: Whether the step draws random numbers; the replay draws the numbers that eager would have drawn.
        needed: Places of the weights that `weights` will be asked for, as often as it will be.
        batch: Places of the inputs that belong to the batch.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        parameters: Sequence[int],
        sampler: Sampler,
        written: Sequence[int] = (),
        draws: bool = False,
        needed: Iterable[int] = (),
        batch: Sequence[int] = (),
    ) -> None:
        tensors = [(place, each) for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
        self._past = Past(
            eager,
            inputs,
            {place: each._version for place, each in tensors if not each.is_inference()},
            {place: inputs[place].detach().clone() for place in written},
            generators_of(each.device for _, each in tensors) if draws else (),
        )
        self._weights, self._sampler = [inputs[index] for index in parameters], sampler
        self._samples = sampler.take(self._weights)
        self._past.needed.update(needed)
        self._past.may_be_replayed = True
        self._batch = batch
        self._needed = {place: sample(inputs[place]) for place in self._past.needed}  # finer than the sampler's
        self._outputs: tuple[Any, ...] | None = None
        self.seconds = 0.0
        keep_for(self._past)

    # ------------------------------------------------------------------ the padded replay

    @property
    def has_run(self) -> bool:
        """Return whether the replay has run."""
        return self._outputs is not None

    @torch.compiler.disable(reason="a step is replayed in eager")
    def outputs(self, name: str) -> tuple[Any, ...]:
        """Return the eager step's outputs, computed at the first call. name: of the output that is wanted.

        Raises `DeferredError` if a weight or the batch has changed.
        """
        if self._outputs is None:
            past = self._past
            self._check(past, name)
            started = time.perf_counter()
            with past.as_it_was():
                given = list(past.inputs)
                for place in past.copies:
                    given[place] = _then(past, place, name)
                self._outputs = tuple(past.eager(*given))
            self.seconds = time.perf_counter() - started
            past.may_be_replayed = False
            self._let_go()
        return self._outputs

    def rewind(self) -> None:
        """Set the random generators to their states at the begin of the step."""
        self._past.rewind()

    def _check(self, past: Past, name: str) -> None:
        for place in past.changed():
            if place not in past.copies:
                given = past.inputs[place]
                kind = "a weight" if isinstance(given, torch.nn.Parameter) else "the batch"
                raise _changed(name, kind, tuple(given.shape))
        copied = {id(past.inputs[place]) for place in past.copies}
        for weight in self._sampler.changed(self._weights, self._samples, copied):
            raise _changed(name, "a weight", tuple(weight.shape))

    # ------------------------------------------------------------------ its weights

    def weights(self, places: Iterable[int], name: str) -> list[torch.Tensor]:
        """Return weights as they were at the call, for output `name`: themselves, or copies of changed ones.

        places: among those in `needed`. Raises `DeferredError` if the batch was overwritten, or a weight was changed
        otherwise than by an optimizer.
        """
        past = self._past
        if any(place in self._batch and place not in past.copies for place in past.changed()):
            raise DeferredError(
                f"{name} is computed from a batch that was overwritten since. Read it before the next batch is copied "
                "in, or compile with options={'defer_outputs': False}."
            )
        return [self._weight(place, name) for place in places]

    def _weight(self, place: int, name: str) -> torch.Tensor:
        past, given = self._past, self._past.inputs[place]
        if place not in past.copies:
            if version_of(given) != past.versions.get(place, -1):
                raise _changed_weight(name, given, "changed in place")
            if given.numel() and storage_of(given) == 0:
                raise _changed_weight(name, given, "freed")
        found = _then(past, place, name) if place in past.copies else given
        before = self._needed[place]
        if before is not None and not same_bits(before, sample(found)):
            raise _changed_weight(name, given, "written through .data, or by a kernel that does not tell autograd,")
        return found

    def release(self, places: Iterable[int]) -> None:
        """Keep these weights for `weights` no longer."""
        self._past.needed -= Counter(places)
        self._let_go()

    def _let_go(self) -> None:
        """Hold nothing more of the call, if nobody can ask for it."""
        if not self._past.needed and not self._past.may_be_replayed:
            forget(self._past)
            self._past, self._weights = Past(self._past.eager, (), {}, {}), []


def _then(past: Past, place: int, name: str) -> torch.Tensor:
    """Return a copied input as it was at the call. A gradient that reaches a changed weight raises, as in eager."""
    given, copy = past.inputs[place], past.copies[place].detach()
    if given.requires_grad:
        copy.requires_grad_().register_hook(functools.partial(_refuse_gradient, name, given.shape))
    return copy


def _refuse_gradient(name: str, shape: torch.Size, gradient: torch.Tensor) -> None:
    raise DeferredError(
        f"a gradient of {name!r} would have to reach a weight of shape {tuple(shape)} that an optimizer has changed "
        "since the step; expected backward before Optimizer.step (eager raises here too): call backward first or detach"
    )


def _changed_weight(name: str, weight: torch.Tensor, how: str) -> DeferredError:
    return DeferredError(
        f"{name!r} is computed at its first use, and a weight of shape {tuple(weight.shape)} that it is made of was "
        f"{how} since the step; expected it unchanged, or changed by an Optimizer.step only: read it before changing "
        "the weights, or compile with torch.compile(..., options={'defer_outputs': False}), which computes it in every "
        "step"
    )


def _changed(name: str, kind: str, shape: tuple[int, ...]) -> DeferredError:
    return DeferredError(
        f"padded positions of {name!r} are computed when they are first looked at, and {kind} of shape {shape} has "
        "changed since the step; expected the first look before that. Look at them before optimizer.step() or before "
        "the batch is overwritten, look at real positions only, or compile with "
        "torch.compile(..., options={'defer_outputs': False}) (deepytorch.configure(options=...) under the import)"
    )
