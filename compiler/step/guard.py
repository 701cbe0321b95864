"""The comparison of a region's form with eager, on a batch of training, before the form's first step.

Both run for the comparison alone: on copies of what the region writes to, such as a norm's statistics, and with the
random numbers of the step. Compiled code draws other numbers than eager, and is not compared where eager draws any. Nor
is a region compared that writes to weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepytorch.comm.gradients.autograd_leaves import has_hooks
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.dynamo.capture import saving_for_nobody
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.agreement import NoVerdict, difference_of_steps
from deepytorch.compiler.step.room import devices_of, has_room
from deepytorch.log import logger

Run = Callable[[Sequence[Any]], Sequence[Any]]


class Guard:
    """The guard of one region.

    own_weights: whether forms run with the model's own weights alone, as code that reduces their gradients. Nothing is
    compared then if the script has put hooks on them, which would be called. written: places of inputs that the region
    writes to; buffers may be left out. needs_memory: whether a form that runs out of memory in a comparison differs.
    The comparison holds eager's gradients besides, so that the form alone may well fit.
    """

    def __init__(
        self,
        record: RegionRecord,
        *,
        own_weights: bool = False,
        written: Collection[int] = frozenset(),
        needs_memory: bool = True,
    ) -> None:
        self._record, self._own_weights, self._written = record, own_weights, written
        self._needs_memory = needs_memory

    def difference(self, eager: Run, form: Run, inputs: Sequence[Any]) -> str | None:
        """Return how a form differs from eager by more than rounding; empty if it does not.

        None if that cannot be known on this batch: memory is short, eager fails, or its numbers are not finite. A form
        that fails differs, and one that runs out of memory.
        """
        devices = devices_of(inputs)
        if not has_room(devices):
            return None
        weights = [each for each in inputs if _is_differentiated(each)]
        if self._own_weights and any(has_hooks(each) for each in weights):
            return None
        if any(inputs[place].is_leaf for place in self._written if _is_differentiated(inputs[place])):
            return None
        started = time.perf_counter()
        try:
            with BUDGET.pause(), torch.random.fork_rng(devices), saving_for_nobody():
                return _compare(eager, form, inputs, devices, own_weights=self._own_weights)
        except KeyboardInterrupt:
            raise
        except NoVerdict as reason:
            logger.debug("%s could not be compared with eager: %s", self._record.name, reason)
            return None
        except Exception as error:
            logger.debug("traceback of the failure", exc_info=error)
            if isinstance(error, torch.OutOfMemoryError) and not self._needs_memory:
                return None
            return f"it failed with {type(error).__name__}: {str(error)[:300]}"
        finally:
            self._record.forms_compared += 1
            self._record.compare_seconds += time.perf_counter() - started


def _compare(eager: Run, form: Run, inputs: Sequence[Any], devices: Sequence[int], *, own_weights: bool) -> str:
    """Return how a form differs from eager; empty if it does not. Raises `NoVerdict` if that cannot be known."""
    # Under other names where possible: hooks of the script are not called, and no gradient goes on to other regions.
    leaves = {
        place: each if own_weights and isinstance(each, torch.nn.Parameter) else _alias(each)
        for place, each in enumerate(inputs)
        if _is_differentiated(each)
    }

    def outputs_of(run: Run, changed: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        given = []
        for place, each in enumerate(inputs):
            leaf = leaves.get(place)
            if leaf is not None:
                value = leaf if changed is None else changed(leaf)
                given.append(value if isinstance(leaf, torch.nn.Parameter) else value.clone())  # it may be written to
            else:  # what a region writes to, such as a norm's statistics, is among these
                given.append(_copy(each) if isinstance(each, Tensor) else each)
        with torch.random.fork_rng(devices):  # every run draws the same numbers
            found = list(run(given))
        # What it writes to is compared as well: a norm's statistics change no loss of this step.
        found += [each for place, each in enumerate(given) if place not in leaves]
        return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]

    if not getattr(form, "draws_alike", True) and _draws(eager, inputs, devices):
        return ""
    worst = difference_of_steps(partial(outputs_of, eager), lambda: outputs_of(form), list(leaves.values()))
    if worst.is_allowed:
        return ""
    return f"{worst.what} by {worst.found:.1e} (relative), where {worst.allowed:.0e} is allowed"


def _draws(eager: Run, inputs: Sequence[Any], devices: Sequence[int]) -> bool:
    """Return whether eager draws random numbers."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

    with torch.no_grad(), torch.random.fork_rng(devices):
        before = states()
        try:
            eager([_copy(each) if isinstance(each, Tensor) else each for each in inputs])
        except Exception as error:
            raise NoVerdict(f"eager fails with {type(error).__name__}: {error}") from error
        return any(not torch.equal(one, other) for one, other in zip(before, states(), strict=True))


def _is_differentiated(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _alias(tensor: Tensor) -> Tensor:
    """Return a leaf with the memory of a tensor, of its class as far as compiled code asks for it."""
    alias = tensor.detach()
    return torch.nn.Parameter(alias) if isinstance(tensor, torch.nn.Parameter) else alias.requires_grad_()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which compiled code asks for; what overlaps itself is not written to."""
    found = tensor.detach().clone()
    if found.stride() == tensor.stride() or tensor.layout is not torch.strided:
        return found
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    found = tensor.new_empty(span if tensor.numel() else 0).as_strided(tensor.shape, tensor.stride())
    return found.copy_(tensor.detach())
