"""The comparison of packed steps with the same steps padded in eager, in training.

In the default mode one step that runs compiled is compared, as soon as the run affords the pause and if memory is
there; with `DEEPYTORCH=verify` one of so many steps, in eager or compiled. Both are run for the comparison alone:
the values that the script trains on are untouched. What follows from a difference: see [Note: Ladder].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepytorch.comm.gradients.autograd_leaves import has_hooks
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.dynamo.capture import saving_for_nobody
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.agreement import difference_of_steps
from deepytorch.compiler.step.room import has_room
from deepytorch.log import logger
from deepytorch.torch_internals import current_graph_task_id

_MOST_ATTEMPTS = 3  # steps whose comparison may come to nothing, as for want of memory
_STEPS = 3.0  # what a comparison takes, in terms of the script's steps before it; a few are longer than a packed one

Run = Callable[[], Sequence[Tensor]]


class Verification:
    """The verification of one region.

    every: one of so many packed steps is compared, the first one among them; None: one that runs compiled, and then
    none any more.
    """

    def __init__(self, every: int | None, record: RegionRecord) -> None:
        self._every, self._record, self._count = every, record, 0
        self.is_over = False  # nothing will be compared any more
        self._is_due, self._attempts = False, 0
        self._began, self._longest = 0.0, 0.0  # when the last step began; the time of the longest step so far

    def take_turn(self, *, is_compiled: bool) -> bool:
        """Count a packed step that begins; return whether it is to be compared. is_compiled: it runs compiled code."""
        if current_graph_task_id() != -1:  # a checkpoint computes it again
            return False
        if self._is_due and is_compiled:
            self._is_due, self.is_over = False, self._every is None
            return True
        if self._every is not None:
            self._count += 1
            return self._count % self._every == 1 or self._every == 1
        now = time.perf_counter()
        if self._began:
            self._longest = max(self._longest, now - self._began)
        self._began = now
        if not (is_compiled and self._longest and BUDGET.affords(_STEPS * self._longest)):
            return False
        self.is_over = True
        return True

    def begin_again(self) -> None:
        """Compare the next step that runs compiled: it is computed in another way."""
        self.is_over, self._is_due, self._count, self._began = False, True, 0, 0.0

    def difference(
        self,
        packed: Run,
        eager: Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]],
        weights: Sequence[Tensor],
        devices: Sequence[int] = (),
    ) -> str | None:
        """Run both forms; return how their outputs, or gradients of `weights`, differ; empty if by rounding alone.

        None if that cannot be known: memory is short, a form fails, or eager's numbers are not finite.

        eager: called with a change of its weights, see `difference_of_steps`. Gradients of weights with hooks are not
        compared, since that would call the hooks. devices: the CUDA devices of the step.
        """
        found = self._compare(packed, eager, weights, devices)
        self._attempts += found is None
        if found is None and self._attempts < _MOST_ATTEMPTS:
            self.is_over = False
        return found

    def _compare(
        self,
        packed: Run,
        eager: Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]],
        weights: Sequence[Tensor],
        devices: Sequence[int],
    ) -> str | None:
        started, record = time.perf_counter(), self._record
        if self._every is None and not has_room(devices):
            return None
        differentiated = [] if any(has_hooks(each) for each in weights) else weights
        try:
            with BUDGET.pause(), torch.random.fork_rng(devices), torch.enable_grad(), saving_for_nobody():
                worst = difference_of_steps(eager, packed, differentiated)
        except KeyboardInterrupt:
            raise
        except Exception as error:  # the step itself comes next: what is wrong with it shows there
            logger.info("%s: a packed step could not be compared with eager: %s", record.name, error)
            return None
        record.verified_steps += 1
        record.verify_seconds += time.perf_counter() - started
        record.largest_difference = max(record.largest_difference, worst.found)
        return "" if worst.is_allowed else f"{worst.what} by {worst.found:.1e} (relative)"
