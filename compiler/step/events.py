"""Events of a region while it runs: each one leads to the region's next state, and a change of route is logged.

The first calls of a region run in eager, and the uses of their outputs are profiled. These uses decide the route of
later calls; uses of later outputs are seen as well.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.route import Route, State, Uses
from deepytorch.log import logger, once

MAX_FALLBACKS = 20  # that a report names
_MAX_USES = 20  # of one output, likewise
_RUNS = {
    Uses.VALUES: "packed, and forward once more padded if half of the batch is pads (else padded alone)",
    Uses.PADS: "padded",
    Uses.GRAPH: "in eager",
}

FRAMEWORKS = (
    "torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "lightning", "lightning_fabric",
    "pytorch_lightning", "megatron", "deepytorch",
)  # fmt: skip


class RegionEvents:
    """The events of one region, which write to its record.

    state: the region's, after the last event. can_replay: whether its forward can run once more in each step.
    """

    def __init__(self, record: RegionRecord, state: State, *, can_replay: bool = True) -> None:
        self.state, self._record, self._can_replay = state, record, can_replay

    # ------------------------------------------------------------------ uses of outputs

    def used_tokens(self, output: str, function: Any) -> None:
        """Note that a script has used only the tokens of an output."""
        self._note(output, name_of(function))

    def looked_at_values(self, output: str, function: Any) -> bool:
        """Note a look at an output's pads without gradients; return whether values without gradients are enough.

        They are not if later steps run padded anyway.
        """
        if not self._can_replay or self.state.uses > Uses.VALUES:
            self.looked_at_pads(output, function)
            return False
        self._used(Uses.VALUES, output, function, "padded positions without gradients")
        return True

    def looked_at_pads(self, output: str, function: Any) -> None:
        """Note that a script has used an output in a way that needs its pads."""
        self._used(Uses.PADS, output, function, "padded positions")

    def asked_for_graph(self, output: str, function: Any) -> None:
        """Note that a script has used an output in a way that needs its place in autograd's graph."""
        self._used(Uses.GRAPH, output, function, "the gradient")

    def keeps_outputs(self) -> None:
        """Note that a script keeps outputs of several calls, of which it has computed none."""
        self._go_on(self.state.used(Uses.PADS, "outputs are kept over several calls without gradients"))

    def _used(self, uses: Uses, output: str, function: Any, looks_at: str) -> None:
        name, where = name_of(function), whose_line()
        self._note(output, f"{name} ({where}) looks at {looks_at}")
        self._go_on(self.state.used(uses, f"{name} at {where} looks at {looks_at} of {output!r}"))

    def _note(self, output: str, use: str) -> None:
        known = self._record.outputs.setdefault(output, [])
        if use not in known and len(known) < _MAX_USES:
            known.append(use)

    # ------------------------------------------------------------------ steps

    def needs_eager_backward(self, asked: str) -> None:
        """Note that a backward of the region was asked for something that compiled code cannot give."""
        before, self.state = self.state, self.state.needs_eager_backward(asked)
        if self.state is before:
            return
        if not self.state.packs:
            self._record.fallbacks.append(f"{self._record.name}: {self.state.because}; the region runs in eager")
        self._say()

    def differed(self) -> None:
        """Note that packed steps of the region differ from eager; the caller has logged it."""
        self.state = self.state.differed()

    def has_no_padded_code(self) -> None:
        """Note that no compiled code of the padded form is to run; the caller has logged it."""
        self.state = self.state.failed(Route.PADDED)

    def profiled(self, outputs: Sequence[Any]) -> None:
        """Note the outputs of a profiled call."""
        trained = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        self.state = self.state.profiled_call(trains=bool(trained))
        for each in trained:
            each.register_hook(self._saw_backward)

    def _saw_backward(self, gradient: torch.Tensor) -> None:
        self.state = self.state.backward()
        if torch.is_grad_enabled():  # with a graph of its own
            self.needs_eager_backward("create_graph=True")

    def failed(self, broken: Route, error: Exception, step: str = "") -> None:
        """Note that a route's code failed where eager did not: the batch was not to blame. step: as for `fell_back`."""
        fell_back(self._record, step or broken.value, error)
        self.state = self.state.failed(broken)

    # ------------------------------------------------------------------

    def _go_on(self, state: State) -> None:
        before, self.state = self.state, state
        if state is not before:
            self._say()

    def _say(self) -> None:
        state = self.state
        text = "%s: %s, so that its steps run %s from now on"
        once(logging.INFO, text, self._record.name, state.because, _RUNS[state.uses])


def fell_back(record: RegionRecord, step: str, error: Exception) -> None:
    """Report that the code of a step failed. step: its kind, "packed" for example."""
    message = f"{record.name}: the {step} step failed with {type(error).__name__}: {str(error)[:500]}"
    if message in record.fallbacks or len(record.fallbacks) >= MAX_FALLBACKS:  # it may fail in every step
        return
    record.fallbacks.append(message)
    once(logging.WARNING, "%s; going on without it", message)
    logger.debug("traceback of the failure", exc_info=error)


def name_of(function: Any) -> str:
    """Return the name by which a user calls a torch function."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and owner is not None:
        return getattr(owner, "__name__", "attribute")
    return getattr(function, "__name__", str(function)).strip("_")


def whose_line() -> str:
    """Return the file and line of the script that is running: the innermost ones that are neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "deepytorch") and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def is_users(hook: Any) -> bool:
    """Return whether no framework wrote a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in FRAMEWORKS
