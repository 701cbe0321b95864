"""The packed form of a region: it decides if a batch is worth packing, and runs the packed step on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.batch_facts import Facts, Indices, Refusal, read_facts
from deepytorch.compiler.step.events import fell_back
from deepytorch.compiler.step.ladder import Ladder, Way
from deepytorch.compiler.step.room import devices_of
from deepytorch.compiler.step.second_backward import SecondBackward
from deepytorch.compiler.step.step_outputs import Places, StepOutputs
from deepytorch.compiler.step.verification import Verification
from deepytorch.log import logger
from deepytorch.passes.unpad.program import Program

# A packed step that saves less than this share of the padded step's work is not worth its gathers.
MIN_SAVING = 0.02


class PackedCall(NamedTuple):
    """A packed step with its arguments.

    again: gives its outputs in eager, for a second backward. finish: is applied to its outputs before anybody gets
    them.
    """

    code: CompiledStep
    second: SecondBackward
    arguments: list[Any]
    again: Callable[..., Sequence[Any]]
    finish: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def run(self, *, is_compiled: bool) -> Sequence[Any]:
        """Return the outputs of the packed graph, which runs operator by operator until it is compiled."""
        if is_compiled:
            values = self.second.run(self.code, self.arguments, self.again, self.arguments)
        else:
            values = self.code.in_eager(self.arguments)
        return values if self.finish is None else self.finish(values)


class Rounded(Protocol):
    """A packed step with few sizes, see `rounding`."""

    def call(self, inputs: Sequence[Any], facts: Facts) -> PackedCall | None:
        """Return the step for one batch; None if the batch runs with sizes of its own."""
        ...


class Packing:
    """The packed form of one region.

    Args:
        eager: Runs the region's graph on padded inputs.
        ladder: The ways to compute the packed step.
        parameters: Places of the inputs that are weights.
        min_padding: The share of pads from which on a batch is packed.
        packs_in_eager: Whether packed steps run operator by operator until they are compiled.
    """

    def __init__(
        self,
        program: Program,
        eager: Callable[..., Any],
        ladder: Ladder,
        rounded: Rounded | None,
        outputs: StepOutputs,
        record: RegionRecord,
        *,
        parameters: Sequence[int],
        min_padding: float,
        verification: Verification | None,
        packs_in_eager: bool,
    ) -> None:
        self.program, self.outputs, self.packs_in_eager = program, outputs, packs_in_eager
        self._eager, self._ladder, self._rounded = eager, ladder, rounded
        self._record, self._parameters, self._min_padding = record, parameters, min_padding
        self._verification = verification

    # ------------------------------------------------------------------ the batch

    def read(self, inputs: Sequence[Any]) -> Facts | Refusal:
        """Return the facts of a batch, or a refusal with the reason for which it is not packed."""
        record = self._record
        with torch.no_grad():
            try:
                facts = read_facts(self.program, inputs)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                fell_back(record, "look at the batch before a", error)
                return Refusal("the batch could not be read")
            if isinstance(facts, Refusal):
                return facts
            tokens, positions = facts.tokens, facts.num_positions
            record.steps_read_back += facts.waited
            record.tokens_real += sum(tokens)
            record.tokens_padded += positions
            record.labels += sum(facts.labels)
            saving = 1.0 - self.program.relative_cost(tokens, facts.labels, facts.sizes)
            padding = 1.0 - sum(tokens) / positions
            if saving < MIN_SAVING or padding < self._min_padding:
                return Refusal("hardly any padding in the batch")
        return facts

    def call(self, inputs: Sequence[Any], facts: Facts, indices: Indices) -> PackedCall:
        """Return the packed step for a batch: with dummy tokens if the batch can have them, else with its own sizes."""
        if self._rounded is not None:
            try:
                call = self._rounded.call(inputs, facts)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                self._without_rounding(error)
                call = None
            if call is not None:
                return call
        arguments = list(map(inputs.__getitem__, self.program.packed_inputs))
        arguments += indices.all_of(self.program.indices)
        way = self._ladder.way
        return PackedCall(way.code, way.second, arguments, partial(self._again, inputs, indices))

    # ------------------------------------------------------------------ the step

    def run(
        self,
        call: PackedCall,
        inputs: Sequence[Any],
        indices: Indices,
        places: Places,
        started: float,
        *,
        is_compiled: bool,
    ) -> tuple[Any, ...]:
        """Run a packed step and return the region's outputs.

        started: the time by `time.perf_counter` at which the host began to work for this call.
        """
        record, compiles = self._record, call.code.compiles
        begun = self.outputs.begin(inputs)
        host = time.perf_counter() - started
        values = call.run(is_compiled=is_compiled)
        started = time.perf_counter()
        outputs = self.outputs.packed(begun, values, indices, places)
        record.steps_packed += 1
        record.steps_rounded += call.code is not self._ladder.way.code
        host += time.perf_counter() - started
        if call.code.compiles > compiles:  # a first run loads code, which is not the cost of a step
            record.compile_seconds += host
        else:
            record.host_seconds += host
        return outputs

    def gives_up_rounding(self, call: PackedCall, error: Exception) -> bool:
        """Drop the step with dummy tokens if `call` was one; return whether it was."""
        if call.code is self._ladder.way.code:
            return False
        self._without_rounding(error)
        return True

    def _without_rounding(self, error: Exception) -> None:
        fell_back(self._record, "rounded", error)
        self._rounded = None

    def _again(self, inputs: Sequence[Any], indices: Indices, *arguments: Any) -> Sequence[Any]:
        """Return the packed step's outputs, computed padded and in eager, where each operator has two derivatives."""
        program = self.program
        given = list(inputs)
        for index, argument in zip(program.packed_inputs, arguments, strict=False):
            given[index] = argument
        taken = [given[index] for index in program.reference_inputs]
        assert program.reference is not None
        return program.reference(*taken, *indices.all_of(program.reference_indices))

    # ------------------------------------------------------------------ the comparison with eager

    def takes_turn_to_verify(self, *, is_compiled: bool) -> bool:
        """Count a packed step that trains; return whether it is to be compared with eager."""
        verification = self._verification
        if verification is None or verification.is_over or not torch.is_grad_enabled():
            return False
        return verification.take_turn(is_compiled=is_compiled)

    def step_down(
        self, difference: str, inputs: Sequence[Any], places: Places, call: PackedCall, *, is_compiled: bool
    ) -> bool:
        """Take another way to compute packed steps, as this one differs from eager; return whether there is one."""
        assert self._verification is not None
        if call.code is not self._ladder.way.code:  # what follows is compared in turn
            self._rounded = None
            goes_on, what = True, "it goes on without dummy tokens"
        else:

            def agrees(way: Way) -> bool | None:
                other = call._replace(code=way.code, second=way.second)
                difference = self._difference(inputs, places, other, is_compiled=False)
                return None if difference is None else not difference

            goes_on, what = self._ladder.step_down(agrees, is_compiled=is_compiled)
        message = f"{self._record.name}: packed and eager steps differ: {difference}; {what}"
        self._record.fallbacks.append(message)
        logger.warning("%s", message)
        self._verification.begin_again()
        return goes_on

    @property
    def compiler_is_to_blame(self) -> bool:
        """Return whether compiled code was found to differ from the graph that it was made of."""
        return self._ladder.compiler_is_to_blame

    def difference(self, inputs: Sequence[Any], places: Places, call: PackedCall, *, is_compiled: bool) -> str | None:
        """Return how the packed step and eager differ on outputs at tokens or on gradients; empty if they do not.

        None if that is not known.
        """
        found = self._difference(inputs, places, call, is_compiled=is_compiled)
        if found == "" and self._verification is not None and self._verification.is_over:
            self._ladder.settle()
        return found

    def _difference(self, inputs: Sequence[Any], places: Places, call: PackedCall, *, is_compiled: bool) -> str | None:
        assert self._verification is not None
        trained = [index for index in self._parameters if inputs[index].requires_grad]
        compared = [
            (number, output) for number, output in enumerate(self.program.outputs) if output.kind in ("value", "tokens")
        ]

        apart = call._replace(arguments=list(map(_from_nowhere, call.arguments)))

        def packed() -> list[torch.Tensor]:
            values = apart.run(is_compiled=is_compiled)
            return [values[output.index] for _, output in compared if _is_float(values[output.index])]

        def eager(changed: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            given = list(map(_from_nowhere, inputs))
            for index in trained:
                given[index] = changed(given[index])
            values = self._eager(*given)
            found = [(output, values[number]) for number, output in compared if _is_float(values[number])]
            return [places.of(output).take(value) if output.kind == "tokens" else value for output, value in found]

        weights = [inputs[index] for index in trained]
        return self._verification.difference(packed, eager, weights, devices_of(inputs))


def _from_nowhere(value: Any) -> Any:
    """Return an activation as a leaf: its graph is the step's own to go through, and no gradient goes on to it."""
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        return value.detach().requires_grad_()
    return value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
