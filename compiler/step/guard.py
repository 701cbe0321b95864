"""The comparison of a region's form with eager, on a batch of training, before the form's first step.

Both run for the comparison alone: on copies of what the region writes to, such as a norm's statistics, and with the
random numbers of the step. Compiled code draws other numbers than eager, and is not compared where eager draws any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepytorch.comm.gradients.autograd_leaves import has_hooks
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.dynamo.capture import saving_for_nobody
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.agreement import difference_of_steps
from deepytorch.compiler.step.room import devices_of, has_room
from deepytorch.log import logger

Run = Callable[[Sequence[Any]], Sequence[Any]]


class Guard:
    """The guard of one region.

    own_weights: whether forms run with the model's own weights alone, as code that reduces their gradients. Nothing is
    compared then if the script has put hooks on them, which would be called.
    """

    def __init__(self, record: RegionRecord, *, own_weights: bool = False) -> None:
        self._record, self._own_weights = record, own_weights

    def difference(self, eager: Run, form: Run, inputs: Sequence[Any]) -> str | None:
        """Return how a form differs from eager by more than rounding; None if it does not, or if memory is short.

        A form that fails differs, too, and one that runs out of memory.
        """
        devices = devices_of(inputs)
        if not has_room(devices):
            return None
        if self._own_weights and any(has_hooks(each) for each in inputs if _is_differentiated(each)):
            return None
        started = time.perf_counter()
        try:
            with BUDGET.pause(), torch.random.fork_rng(devices), saving_for_nobody():
                return _compare(eager, form, inputs, own_weights=self._own_weights)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            logger.debug("traceback of the failure", exc_info=error)
            return f"it failed with {type(error).__name__}: {str(error)[:300]}"
        finally:
            self._record.forms_compared += 1
            self._record.compare_seconds += time.perf_counter() - started


def _compare(eager: Run, form: Run, inputs: Sequence[Any], *, own_weights: bool) -> str | None:
    state = torch.get_rng_state()
    # Weights under other names where possible: hooks that the script has put on its own are not called.
    weights = {
        place: each if own_weights else _alias(each) for place, each in enumerate(inputs) if _is_differentiated(each)
    }

    def outputs_of(run: Run, changed: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        torch.set_rng_state(state)
        given = []
        for place, each in enumerate(inputs):
            if place in weights:
                given.append(weights[place] if changed is None else changed(weights[place]))
            else:  # what a region writes to, such as a norm's statistics, is among these
                given.append(each.detach().clone() if isinstance(each, Tensor) else each)
        found = list(run(given))
        # What it writes to is compared as well: a norm's statistics change no loss of this step.
        found += [each for place, each in enumerate(given) if place not in weights]
        return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]

    if not getattr(form, "draws_alike", True) and _draws(eager, outputs_of, state):
        return None
    worst = difference_of_steps(partial(outputs_of, eager), lambda: outputs_of(form), list(weights.values()))
    if worst.is_allowed:
        return None
    return f"{worst.what} by {worst.found:.1e} (relative), where {worst.allowed:.0e} is allowed"


def _draws(eager: Run, outputs_of: Callable[[Run], object], state: Tensor) -> bool:
    """Return whether eager draws random numbers."""
    with torch.no_grad():
        outputs_of(eager)
    return not torch.equal(torch.get_rng_state(), state)


def _is_differentiated(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _alias(tensor: Tensor) -> Tensor:
    """Return a leaf with the memory of a tensor, of its class as far as compiled code asks for it."""
    alias = tensor.detach()
    return torch.nn.Parameter(alias) if isinstance(tensor, torch.nn.Parameter) else alias.requires_grad_()
