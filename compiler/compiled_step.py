"""A graph that is compiled at its first call, with the sizes that vary from batch to batch as symbols.

A nested `torch.compile` with guards of its own does it, so that Dynamo's graph around it is not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.dynamic_sizes import mark_alias
from deepytorch.compiler.lower_region import RegionLowering
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.second_backward import SecondBackward
from deepytorch.log import once
from deepytorch.torch_internals import OpOverload


class CompiledStep:
    """A graph that is compiled at its first call, with the sizes that vary marked.

    `varying`: for every argument the dimensions that vary from batch to batch.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        varying: Sequence[tuple[int, ...]],
        lowering: RegionLowering,
        record: RegionRecord,
        second: SecondBackward,
    ) -> None:
        self._module, self._varying, self._lowering, self._record = module, varying, lowering, record
        self._second = second
        self.compiles = 0  # so far
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, arguments: list[Any], again: Callable[..., Sequence[Any]] | None = None) -> Sequence[Any]:
        """Run the step. `again` gives the same outputs of the same arguments in eager, for a second backward; the
        step's own graph does where it is None.
        """
        call = self._second.begin(arguments, again or self._module.forward)
        outputs = self._run(arguments)
        self._second.watch(call, outputs)
        return outputs

    def _run(self, arguments: list[Any]) -> Sequence[Any]:
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
        if self.compiles:
            self._record.recompiles += 1
        self.compiles += 1
        _carry_tags(self._module.graph, module.graph)
        return self._lowering.compile(module, example_inputs)


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
    return [n for n in graph.nodes if isinstance(n.target, OpOverload) and n.target is not sizes]


def read_inputs(module: fx.GraphModule, count: int) -> tuple[int, ...]:
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
