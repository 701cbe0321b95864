"""One step of a packed region: look at the batch, choose the packed or the padded step, hand its outputs back.

The first step runs in eager, and what is done with its outputs is watched (`usage`): a region whose outputs are looked
at where their pads are never runs packed, and one whose outputs are asked for gradients goes on in eager.

The two steps are compiled at their first use, each by a nested `torch.compile` with guards of its own, so that a size
that varies from batch to batch (the number of tokens) is symbolic without touching Dynamo's graph around it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.batch_facts import Facts, Indices, Refusal, read_facts
from deepytorch.compiler.compiled_step import CompiledStep, read_inputs
from deepytorch.compiler.dynamic_sizes import symbolic_dims
from deepytorch.compiler.lower_region import RegionLowering
from deepytorch.compiler.outputs.deferred import must_be_plain
from deepytorch.compiler.outputs.usage import Level, Usage, WatchedCalls
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.rounded_step import PackedCall, RoundedStep, rounded_step, without_recording
from deepytorch.compiler.second_backward import SecondBackward
from deepytorch.compiler.step_outputs import Places, StepOutputs
from deepytorch.compiler.trace_gate import current_trace
from deepytorch.compiler.unused_outputs import parts_in_outputs
from deepytorch.compiler.verification import Verification
from deepytorch.log import logger, once
from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.unpad.program import Program
from deepytorch.torch_internals import current_graph_task_id, top_saved_tensors_default_hooks

# A packed step that saves less than this share of the padded step's work is not worth its gathers.
MIN_SAVING = 0.02
MAX_FALLBACKS = 20  # that a report names

_KEEPS_MORE = "it is being compiled, and operator by operator would keep what is to be computed again"
_TAKES_LONGER = "it is being compiled, and packing takes longer than it saves until then"


@dataclass(frozen=True)
class Effects:
    """What a region does besides computing its outputs. written: the inputs that it writes to. draws: whether it draws
    random numbers.
    """

    written: tuple[int, ...] = ()
    draws: bool = False


class RewrittenStep:
    """What Dynamo calls in place of a region that was rewritten for every batch alike."""

    def __init__(
        self,
        module: fx.GraphModule,
        fakes: Sequence[Any],
        eager: Callable[..., Any],
        lowering: RegionLowering,
        record: RegionRecord,
        effects: Effects,
    ) -> None:
        """fakes: as `Step` takes them."""
        self._eager, self._effects, self._record, self._failed = eager, effects, record, False
        self._inputs = read_inputs(module, len(fakes))
        self._usage = Usage(record.name)
        second = SecondBackward((), self._usage.twice, parts_in_outputs(module.graph))
        varying = [symbolic_dims(fakes[index]) for index in self._inputs]
        self._step = CompiledStep(module, varying, lowering, record, second)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step of the region."""
        if self._failed or self._usage.level is Level.EAGER:
            return tuple(self._eager(*inputs))
        arguments = [inputs[index] for index in self._inputs]
        if self._step.recomputes and not self._step.is_compiled(arguments):
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._step(arguments))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._effects.written:
                raise
            _fell_back(self._record, "rewritten", error)
            outputs = tuple(self._eager(*inputs))
            self._failed = True  # eager went through, so the batch was not to blame
            return outputs


def _fell_back(record: RegionRecord, step: str, error: Exception) -> None:
    message = f"{record.name}: the {step} step failed with {type(error).__name__}: {str(error)[:500]}"
    if message in record.fallbacks or len(record.fallbacks) >= MAX_FALLBACKS:  # facts may fail in every step
        return
    record.fallbacks.append(message)
    once(logging.WARNING, "%s; going on without it", message)
    logger.debug("traceback of the failure", exc_info=error)


class Step:
    """What Dynamo calls in place of a packed region."""

    def __init__(
        self,
        padded: fx.GraphModule,
        packed: fx.GraphModule,
        program: Program,
        inputs: Sequence[GraphInput],
        fakes: Sequence[Any],
        eager: Callable[..., Any],
        lowering: RegionLowering,
        record: RegionRecord,
        effects: Effects,
        min_padding: float = 0.0,
        zero_outputs: bool = False,
        verify_every: int | None = None,
        round_sizes: bool = False,
    ) -> None:
        """verify_every: of so many packed steps one is compared with eager; None compares none. round_sizes: whether
        these get few sizes only.
        """
        self._program, self._record, self._eager, self._effects = program, record, eager, effects
        self._min_padding = min_padding
        self._padded_inputs = read_inputs(padded, len(inputs))
        self._usage = Usage(record.name)
        record.outputs = self._usage.outputs
        seconds = [SecondBackward((), self._usage.twice, parts_in_outputs(each.graph)) for each in (padded, packed)]
        self._padded = CompiledStep(
            padded, [symbolic_dims(fakes[index]) for index in self._padded_inputs], lowering, record, seconds[0]
        )
        varying = [symbolic_dims(fakes[index]) for index in program.packed_inputs] + [(0,)] * len(program.indices)
        self._rounded: RoundedStep | None = None
        if round_sizes:
            self._rounded = rounded_step(packed, program, fakes, lowering, record, self._usage.twice, zero_outputs)
            lowering = without_recording(lowering)
        self._packed: CompiledStep | None = CompiledStep(packed, varying, lowering, record, seconds[1])
        batch = tuple(index for index, given in enumerate(inputs) if given.role is Role.BATCH)
        self._parameters = tuple(index for index, given in enumerate(inputs) if given.role is Role.PARAMETER)
        self._padded_failed = False
        trace = current_trace()
        self._packs_in_eager = trace is None or trace.packs_in_eager
        self._outputs = StepOutputs(
            program, eager, self._usage, record, batch, self._parameters, effects.written, effects.draws
        )
        compares = verify_every is not None and not effects.written and not effects.draws
        self._verification = Verification(verify_every, record) if compares and verify_every is not None else None
        # else a backward of our own would reduce gradients between ranks
        self._differentiates = lowering.gradients is None
        # None: it is known how outputs are used, or it does not matter
        self._watched = WatchedCalls(self._usage) if self._outputs.are_deferred and not zero_outputs else None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step of the region."""
        if self._usage.level is Level.EAGER:
            return self._run_eager(inputs, self._usage.reason)
        if self._outputs.are_deferred and _is_recomputed():
            return self._run_eager(inputs, "under hooks on saved tensors, such as a checkpoint's around the model")
        if self._outputs.are_deferred and must_be_plain():
            return self._run_eager(inputs, "DistributedDataParallel looks for unused parameters behind its outputs")
        started = time.perf_counter()
        chosen = self._choose(inputs)
        if isinstance(chosen, Refusal):
            self._record.host_seconds += time.perf_counter() - started
            return self._run_padded(inputs, chosen.reason)
        indices = Indices(chosen)
        places = Places(indices, chosen.sizes, self._program.outputs)
        if self._watched is not None:
            if self._watched.goes_on:
                return self._watch(inputs, places, self._watched)
            self._watched = None
        call = self._rounded_call(inputs, chosen) or self._call(inputs, indices)
        if self._verification is not None and self._verification.is_due() and torch.is_grad_enabled():
            if not self._agrees(inputs, places, call):
                self._usage.differs()
                return self._run_padded(inputs, self._usage.reason)
            started = time.perf_counter()
        return self._run_packed(inputs, indices, places, call, started)

    def _run_packed(
        self, inputs: Sequence[Any], indices: Indices, places: Places, call: PackedCall, started: float
    ) -> tuple[Any, ...]:
        """started: when the host began to work for this step, by `time.perf_counter`."""
        step = call.step
        if (step.recomputes or not self._packs_in_eager) and not step.is_compiled(call.arguments):
            self._record.steps_meanwhile += 1
            return self._run_eager(inputs, _KEEPS_MORE if step.recomputes else _TAKES_LONGER)
        begun = self._outputs.begin(inputs)
        host = time.perf_counter() - started
        compiles = step.compiles
        try:
            values = call.run()
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if step is self._packed:
                return self._without_packed(inputs, error)
            self._without_rounded(error)  # it writes to no input
            return self._run_packed(inputs, indices, places, self._call(inputs, indices), time.perf_counter())
        started = time.perf_counter()
        outputs = self._outputs.packed(begun, values, indices, places)
        self._record.steps_packed += 1
        self._record.steps_rounded += step is not self._packed
        host += time.perf_counter() - started
        if step.compiles > compiles:  # what is done for the first time loads code and is not a step's cost
            self._record.compile_seconds += host
        else:
            self._record.host_seconds += host
        return outputs

    def _call(self, inputs: Sequence[Any], indices: Indices) -> PackedCall:
        """The packed step with the batch's own sizes."""
        assert self._packed is not None
        arguments = [inputs[index] for index in self._program.packed_inputs]
        arguments += [indices.get(index) for index in self._program.indices]
        return PackedCall(self._packed, arguments, partial(self._packed_again, inputs, indices))

    def _rounded_call(self, inputs: Sequence[Any], facts: Facts) -> PackedCall | None:
        """The packed step with dummy tokens, where there is one for this batch."""
        if self._rounded is None:
            return None
        try:
            return self._rounded.call(inputs, facts)
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            self._without_rounded(error)
            return None

    def _without_rounded(self, error: Exception) -> None:
        _fell_back(self._record, "rounded", error)
        self._rounded = None

    def _agrees(self, inputs: Sequence[Any], places: Places, call: PackedCall) -> bool:
        """Whether the packed step gives at tokens what eager gives, and weights the same gradients."""
        assert self._verification is not None
        compared = [
            (number, output)
            for number, output in enumerate(self._program.outputs)
            if output.kind in ("value", "tokens")
        ]

        def packed() -> list[torch.Tensor]:
            values = call.run()
            return [values[output.index] for _, output in compared if _is_float(values[output.index])]

        def eager() -> list[torch.Tensor]:
            values = self._eager(*inputs)
            found = [(output, values[number]) for number, output in compared if _is_float(values[number])]
            return [places.of(output).take(value) if output.kind == "tokens" else value for output, value in found]

        weights = [inputs[index] for index in self._parameters if inputs[index].requires_grad]
        return self._verification.agree(packed, eager, weights if self._differentiates else [])

    def _packed_again(self, inputs: Sequence[Any], indices: Indices, *arguments: Any) -> Sequence[Any]:
        """What the packed step gives, computed padded and in eager, where every operator has a second derivative."""
        program = self._program
        given = list(inputs)
        for index, argument in zip(program.packed_inputs, arguments, strict=False):
            given[index] = argument
        taken = [given[index] for index in program.reference_inputs]
        assert program.reference is not None
        return program.reference(*taken, *(indices.get(index) for index in program.reference_indices))

    def _watch(self, inputs: Sequence[Any], places: Places, watched: WatchedCalls) -> tuple[Any, ...]:
        """The step in eager, with outputs whose uses are noted."""
        plain = tuple(self._eager(*inputs))
        self._record.steps_watched += 1
        watched.took(plain)
        return self._outputs.watched(plain, places)

    # ------------------------------------------------------------------ choosing

    def _choose(self, inputs: Sequence[Any]) -> Facts | Refusal:
        if self._packed is None:
            return Refusal("the packed step failed")
        if self._usage.level is Level.PADDED:
            return Refusal(self._usage.reason)
        with torch.no_grad():
            try:
                facts = read_facts(self._program, inputs)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                _fell_back(self._record, "look at the batch before a", error)
                return Refusal("the batch could not be read")
            if isinstance(facts, Refusal):
                return facts
            tokens = facts.tokens
            self._record.steps_read_back += facts.waited
            self._record.tokens_real += sum(tokens)
            self._record.tokens_padded += facts.num_positions
            self._record.labels += sum(facts.labels)
            saving = 1.0 - self._program.relative_cost(tokens, facts.labels, facts.sizes)
            padding = 1.0 - sum(tokens) / facts.num_positions
            if saving < MIN_SAVING or padding < self._min_padding:
                return Refusal("hardly any padding in the batch")
        return facts

    # ------------------------------------------------------------------ the other ways

    def _run_padded(self, inputs: Sequence[Any], reason: str) -> tuple[Any, ...]:
        record = self._record
        record.steps_padded += 1
        record.padded_because[reason] = record.padded_because.get(reason, 0) + 1
        arguments = [inputs[index] for index in self._padded_inputs]
        if self._padded_failed or (self._padded.recomputes and not self._padded.is_compiled(arguments)):
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._padded(arguments))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._effects.written:
                raise
            _fell_back(self._record, "padded", error)
            outputs = tuple(self._eager(*inputs))
            self._padded_failed = True  # eager went through, so the batch was not to blame
            return outputs

    def _run_eager(self, inputs: Sequence[Any], reason: str) -> tuple[Any, ...]:
        record = self._record
        record.steps_padded += 1
        record.padded_because[reason] = record.padded_because.get(reason, 0) + 1
        return tuple(self._eager(*inputs))

    def _without_packed(self, inputs: Sequence[Any], error: Exception) -> tuple[Any, ...]:
        """The packed step failed before it changed anything: this batch and all later ones run padded."""
        if self._effects.written:
            raise error
        _fell_back(self._record, "packed", error)
        self._packed = None
        return self._run_padded(inputs, "the packed step failed")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_recomputed() -> bool:
    """Whether what this call saves for its backward is in other hands, which may run it again and compare."""
    hooks = top_saved_tensors_default_hooks(True)
    return hooks is not None or current_graph_task_id() != -1
