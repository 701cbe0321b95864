"""A packed step whose sizes are rounded up to a few, for which CUDA graphs are recorded.

The packed graph is cut in two (`packed_body`). The prologue, which depends on the batch alone, runs first, operator by
operator. The body sees rounded sizes only; it is compiled once, and recorded for each combination of sizes that is met.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.batch_facts import Facts
from deepytorch.compiler.step.packing import PackedCall
from deepytorch.compiler.step.rounding.packed_body import cut
from deepytorch.compiler.step.rounding.sizes import MAX_SIZES, RoundedIndices, SizeLadder, why_not_rounded
from deepytorch.compiler.step.second_backward import SecondBackward
from deepytorch.compiler.step.unused_outputs import parts_in_outputs
from deepytorch.log import logger, once
from deepytorch.passes.unpad.program import Program
from deepytorch.passes.unpad.region import Declined
from deepytorch.torch_internals import inductor_config


class RoundedStep:
    """The packed step of one region with dummy tokens, for batches that a combination of sizes is found for.

    Raises `Declined` if the region cannot have one. padded_sizes: the symbols of the spaces' positions.
    """

    def __init__(
        self,
        packed: fx.GraphModule,
        program: Program,
        padded_sizes: Collection[sympy.Symbol],
        lowering: RegionLowering,
        record: RegionRecord,
        asked_twice: Callable[[str], None],
    ) -> None:
        """Cut the packed graph in two.

        lowering: as for `packed_region`. asked_twice: called at a second backward.
        """
        reason = why_not_rounded(program, has_bias=_has_bias(packed.graph))
        if reason is not None:
            raise Declined(reason, "sizes")
        self._program, self._record = program, record
        self._cut = cut(packed, padded_sizes)
        self.ladder = SizeLadder(program)
        self._second = SecondBackward((), asked_twice, parts_in_outputs(self._cut.body.graph))
        self._body = CompiledStep(self._cut.body, self._cut.varying, recording(lowering), record)
        self._is_recorded = lowering.config.lowering == "inductor" and lowering.config.records_graphs

    def call(self, inputs: Sequence[Any], facts: Facts) -> PackedCall | None:
        """Return the step for one batch; None if the batch runs with sizes of its own."""
        sizes = self.ladder.fit(facts)
        if isinstance(sizes, str):
            reasons = self._record.own_sizes_because
            reasons[sizes] = reasons.get(sizes, 0) + 1
            return None
        indices = RoundedIndices(facts, sizes)
        given = [inputs[index] for index in self._program.packed_inputs]
        given += [indices.get(index) for index in self._program.indices]
        parts = self._cut
        with torch.no_grad():
            early = parts.prologue.forward(*(given[index] for index in parts.prologue_inputs))
        arguments = [given[index] for index in parts.body_inputs]
        arguments += early[: parts.num_between]
        finish = partial(self._finish, facts, early[parts.num_between :])
        self._record.sizes_recorded = len(self.ladder.known)
        return PackedCall(self._body, self._second, arguments, partial(self._again, inputs, indices), finish)

    def _finish(self, facts: Facts, early: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the packed graph's outputs without dummies, in memory that no replay of a CUDA graph writes to."""
        found = []
        for (kind, where), entries in zip(self._cut.outputs, self._program.values, strict=True):
            value = values[where] if kind == "body" else early[where] if kind == "prologue" else where
            if entries is not None:
                count = sum(facts.lengths[entries.space]) if entries.loss is None else facts.labels[entries.loss]
                value = value.narrow(0, 0, count)
            is_replayed = self._is_recorded and kind == "body" and isinstance(value, torch.Tensor) and value.is_cuda
            found.append(value.clone() if is_replayed else value)
        return found

    def _again(self, inputs: Sequence[Any], indices: RoundedIndices, *arguments: Any) -> list[Any]:
        """Return the body's outputs, computed padded and in eager, where every operator has a second derivative."""
        program, given = self._program, list(inputs)
        for index, argument in zip(self._cut.body_inputs, arguments, strict=False):
            if index < len(program.packed_inputs):
                given[program.packed_inputs[index]] = argument
        taken = [given[index] for index in program.reference_inputs]
        assert program.reference is not None
        values = program.reference(*taken, *(indices.get(index) for index in program.reference_indices))
        return [value for value, (kind, _) in zip(values, self._cut.outputs, strict=True) if kind == "body"]


def _has_bias(graph: fx.Graph) -> bool:
    attention = torch.ops.deepytorch.varlen_attention.default
    return any(
        node.target is attention and ((len(node.args) > 7 and node.args[7] is not None) or node.kwargs.get("bias"))
        for node in graph.nodes
    )


def rounded_step(
    packed: fx.GraphModule,
    program: Program,
    fakes: Sequence[Any],
    lowering: RegionLowering,
    record: RegionRecord,
    asked_twice: Callable[[str], None],
) -> RoundedStep | None:
    """Return the step for few sizes; None, with the reason in the record, if the region cannot have one.

    fakes: of the region's inputs. Other arguments: as for `RoundedStep`.
    """
    try:
        return RoundedStep(packed, program, _padded_sizes(program, fakes), lowering, record, asked_twice)
    except Declined as declined:
        record.declined.append(f"{declined.where}: not rounded: {declined}")
    except Exception as error:
        record.declined.append(f"sizes: not rounded: {type(error).__name__}: {error}")
        once(logging.WARNING, "sizes are not rounded (%s: %s)", type(error).__name__, error)
        logger.debug("traceback of the failure", exc_info=True)
    return None


def _padded_sizes(program: Program, fakes: Sequence[Any]) -> frozenset[sympy.Symbol]:
    """Return the symbols of the positions of a program's spaces."""
    sizes = [fakes[index].shape[positions] for index, _, positions in program.sizes]
    return frozenset(
        symbol
        for size in sizes
        if isinstance(size, torch.SymInt)
        for symbol in size.node.shape_env.replace(size.node.expr).free_symbols
    )


def recording(lowering: RegionLowering) -> RegionLowering:
    """Return the lowering of a step with few sizes: stateful operators are cut out of its CUDA graphs."""
    ours = {"graph_partition": True, "triton.cudagraph_dynamic_shape_warn_limit": MAX_SIZES}
    return _with(lowering, ours, over=False)


def without_recording(lowering: RegionLowering) -> RegionLowering:
    """Return the lowering of a step whose sizes vary from batch to batch: without CUDA graphs."""
    return _with(lowering, {"triton.cudagraphs": False}, over=True)


def _with(lowering: RegionLowering, options: dict[str, Any], *, over: bool) -> RegionLowering:
    """Return the lowering with further options of Inductor. over: whether `options` override the user's."""
    config = lowering.config
    if config.lowering != "inductor" or not config.records_graphs:
        return lowering
    known = inductor_config.get_config_copy()
    options = {name: value for name, value in options.items() if name in known}
    merged = {**config.inductor, **options} if over else {**options, **config.inductor}
    changed: CompilerConfig = replace(config, inductor=merged)
    return replace(lowering, config=changed)
