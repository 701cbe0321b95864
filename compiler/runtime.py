"""One step of a packed region: look at the batch, choose the packed or the padded step, hand its outputs back.

The two steps are compiled at their first use, each by a nested `torch.compile` with guards of its own, so that a size
that varies from batch to batch (the number of tokens) is symbolic without touching Dynamo's graph around it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.deferred import defer
from deepytorch.compiler.dynamic import mark_alias, symbolic_dims
from deepytorch.compiler.facts import Facts, Indices, Refusal, read_facts
from deepytorch.compiler.report import RegionRecord
from deepytorch.errors import DeferredError
from deepytorch.log import logger, once
from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.program import Output, Program
from deepytorch.passes.samples import same_bits, sample

Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# A packed step that saves less than this share of the padded step's work is not worth its gathers.
MIN_SAVING = 0.02


class CompiledStep:
    """A graph that is compiled at its first call, with the sizes that vary marked.

    `varying`: for every argument the dimensions that vary from batch to batch.
    """

    def __init__(
        self, module: fx.GraphModule, varying: Sequence[tuple[int, ...]], lower: Lower, record: RegionRecord
    ) -> None:
        self._module, self._varying, self._lower, self._record = module, varying, lower, record
        self._compiles = 0
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the step."""
        if self._compiled is None:
            # Dynamo never enters code that was generated while it was compiling, so it is generated again.
            self._module.recompile()
            compiled = torch.compile(self._module.forward, backend=self._backend, fullgraph=True)
            arguments = [
                mark_alias(value, dims) if dims else value for value, dims in zip(arguments, self._varying, strict=True)
            ]
            started = time.perf_counter()
            outputs = compiled(*arguments)
            self._compiled = compiled
            self._record.compile_seconds += time.perf_counter() - started
            return outputs
        return self._compiled(*arguments)

    def _backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._record.compiles += 1
        if self._compiles:
            self._record.recompiles += 1
        self._compiles += 1
        _carry_tags(self._module.graph, module.graph)
        return self._lower(module, example_inputs)


def _carry_tags(source: fx.Graph, traced: fx.Graph) -> None:
    """Give the tags of activation checkpointing to Dynamo's trace of `source`, which went through generated code."""
    tagged, untagged = _operator_calls(source), _operator_calls(traced)
    if not any("recompute" in node.meta for node in tagged):
        return
    if [node.target for node in tagged] != [node.target for node in untagged]:
        once(logging.WARNING, "activation checkpointing was lost on the way: more memory may be used")
        return
    for node, other in zip(tagged, untagged, strict=True):
        for name in ("recompute", "ac_graph_id"):
            if name in node.meta:
                other.meta[name] = node.meta[name]


def _operator_calls(graph: fx.Graph) -> list[fx.Node]:
    sizes = torch.ops.aten.sym_size.int
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target is not sizes]


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
        lower: Lower,
        record: RegionRecord,
        may_run_twice: bool,
        min_padding: float = 0.0,
    ) -> None:
        self._program, self._record, self._eager = program, record, eager
        self._may_run_twice, self._min_padding = may_run_twice, min_padding
        self._padded_inputs = _read_inputs(padded, len(inputs))
        self._padded = CompiledStep(
            padded, [symbolic_dims(fakes[index]) for index in self._padded_inputs], lower, record
        )
        varying = [symbolic_dims(fakes[index]) for index in program.packed_inputs] + [(0,)] * len(program.indices)
        self._packed: CompiledStep | None = CompiledStep(packed, varying, lower, record)
        self._batch = tuple(index for index, given in enumerate(inputs) if given.role is Role.BATCH)
        self._parameters = tuple(index for index, given in enumerate(inputs) if given.role is Role.PARAMETER)
        self._padded_failed = False
        self._want_padded = False  # somebody reads deferred outputs that only the padded step computes

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step of the region."""
        started = time.perf_counter()
        chosen = self._choose(inputs)
        if isinstance(chosen, Refusal):
            self._record.host_seconds += time.perf_counter() - started
            return self._run_padded(inputs, chosen.reason)
        indices = Indices(chosen)
        arguments = [inputs[index] for index in self._program.packed_inputs]
        arguments += [indices.get(index) for index in self._program.indices]
        host = time.perf_counter() - started
        compiles = self._record.compiles
        assert self._packed is not None
        try:
            values = self._packed(arguments)
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            return self._without_packed(inputs, error)
        started = time.perf_counter()
        taken = _Taken(inputs, values, indices, chosen.sizes, _Batch(inputs[index] for index in self._batch))
        outputs = tuple(
            values[output.index] if output.kind == "value" else self._defer(output, place, taken)
            for place, output in enumerate(self._program.outputs)
        )
        self._record.steps_packed += 1
        host += time.perf_counter() - started
        if self._record.compiles > compiles:  # what is done for the first time loads code and is not a step's cost
            self._record.compile_seconds += host
        else:
            self._record.host_seconds += host
        return outputs

    # ------------------------------------------------------------------ choosing

    def _choose(self, inputs: Sequence[Any]) -> Facts | Refusal:
        if self._packed is None:
            return Refusal("the packed step failed")
        if self._want_padded:
            return Refusal("outputs past the last label are read")
        with torch.no_grad():
            try:
                facts = read_facts(self._program, inputs)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                self._fell_back("look at the batch before a", error)
                return Refusal("the batch could not be read")
            if isinstance(facts, Refusal):
                return facts
            tokens = facts.tokens
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
        if self._padded_failed:
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._padded([inputs[index] for index in self._padded_inputs]))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not self._may_run_twice:
                raise
            self._fell_back("padded", error)
            outputs = tuple(self._eager(*inputs))
            self._padded_failed = True  # eager went through, so the batch was not to blame
            return outputs

    def _without_packed(self, inputs: Sequence[Any], error: Exception) -> tuple[Any, ...]:
        """The packed step failed before it changed anything: this batch and all later ones run padded."""
        if not self._may_run_twice:
            raise error
        self._fell_back("packed", error)
        self._packed = None
        return self._run_padded(inputs, "the packed step failed")

    def _fell_back(self, step: str, error: Exception) -> None:
        message = f"{self._record.name}: the {step} step failed with {type(error).__name__}: {str(error)[:500]}"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s; going on without it", message)
        logger.debug("traceback of the failure", exc_info=error)

    # ------------------------------------------------------------------ outputs

    def _defer(self, output: Output, place: int, taken: _Taken) -> torch.Tensor:
        """Output number `place` of the region, for whoever comes to use it."""
        return self._defer_tail(output, taken) if output.kind == "tail" else self._defer_twin(output, place, taken)

    def _defer_tail(self, output: Output, taken: _Taken) -> torch.Tensor:
        tail, meta = self._program.tails[output.index], output.meta
        assert meta is not None
        given = [taken.inputs[index] for index in tail.inputs]
        learned = [number for number, index in enumerate(tail.inputs) if index in self._parameters]
        weights = [given[number] for number in learned]
        rest = [taken.values[index] for index in tail.values] + [taken.indices.get(index) for index in tail.indices]
        batch = taken.batch

        def compute(weights_then: list[torch.Tensor]) -> torch.Tensor:
            batch.check(meta.name)
            arguments = list(given)
            for number, weight in zip(learned, weights_then, strict=True):
                arguments[number] = weight
            return tail.module(*arguments, *rest)[0]

        return defer(
            meta.shape(taken.sizes),
            compute,
            dtype=meta.dtype,
            device=rest[0].device,
            requires_grad=any(value.requires_grad for value in (*rest, *weights)),
            name=meta.name,
            depends_on=weights,
        )

    def _defer_twin(self, output: Output, place: int, taken: _Taken) -> torch.Tensor:
        meta = output.meta
        assert meta is not None
        inputs, batch = taken.inputs, taken.batch
        parameters = [inputs[index] for index in self._parameters]
        versions = [parameter._version for parameter in parameters]
        samples = [sample(parameter) for parameter in parameters]

        def compute(_: list[torch.Tensor]) -> torch.Tensor:
            self._want_padded = True
            batch.check(meta.name)
            moved = [parameter._version for parameter in parameters] != versions
            if moved or not all(map(_unchanged, samples, parameters)):
                raise DeferredError(
                    f"{meta.name} was left out of the packed step and its weights have changed since. Read it before "
                    "optimizer.step(), or compile with options={'defer_outputs': False}. Later steps compute it."
                )
            return tuple(self._padded([inputs[index] for index in self._padded_inputs]))[place]

        return defer(
            meta.shape(taken.sizes),
            compute,
            dtype=meta.dtype,
            device=inputs[self._batch[0]].device,
            requires_grad=any(parameter.requires_grad for parameter in parameters),
            name=meta.name,
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A packed step that was taken, for its deferred outputs; each keeps only the parts that it is made from."""

    inputs: Sequence[Any]
    values: Sequence[Any]
    indices: Indices
    sizes: Sequence[tuple[int, int]]
    batch: _Batch


class _Batch:
    """The batch's tensors as they were, to be told if one is overwritten."""

    __slots__ = ("_versions",)

    def __init__(self, inputs: Iterable[Any]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in inputs if isinstance(tensor, torch.Tensor)]

    def check(self, name: str) -> None:
        """Raise `DeferredError` where the batch was overwritten since."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise DeferredError(
                f"{name} is computed from a batch that was overwritten since. Read it before the next batch is copied "
                "in, or compile with options={'defer_outputs': False}."
            )


def _unchanged(before: torch.Tensor | None, weight: torch.Tensor) -> bool:
    return before is None or same_bits(before, sample(weight))


def _read_inputs(module: fx.GraphModule, count: int) -> tuple[int, ...]:
    """Drop the inputs that a padded graph does not read (sizes, mostly); say which stay."""
    kept = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == count
    for index, node in enumerate(placeholders):
        if node.users:
            kept.append(index)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return tuple(kept)
