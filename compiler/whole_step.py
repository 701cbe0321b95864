"""A region that is compiled as it is, as stock would, and runs in eager until that is done beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.capture import sizes_from_tensors
from deepytorch.compiler.compiled_step import CompiledStep, read_inputs
from deepytorch.compiler.dynamic_sizes import symbolic_dims
from deepytorch.compiler.lower_region import RegionLowering
from deepytorch.compiler.manager import copied
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.second_backward import TwiceDifferentiable
from deepytorch.compiler.unread_statistics import unread_statistics
from deepytorch.compiler.unused_outputs import parts_in_outputs
from deepytorch.torch_internals import HigherOrderOperator


def can_be_compiled_later(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's can be traced by Dynamo once more: it holds no graphs, and no numbers but sizes."""
    sizes = set()
    for node in module.graph.nodes:
        if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
            return False
        if node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), torch.Tensor):
            return False
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            shape: Sequence[Any] = value.shape
            sizes |= {size.node.expr for size in shape if isinstance(size, torch.SymInt)}
    numbers = [
        node.meta.get("example_value")
        for node in module.graph.nodes
        if node.op == "placeholder" and node.users and not isinstance(node.meta.get("example_value"), torch.Tensor)
    ]
    return all(isinstance(each, torch.SymInt) and each.node.expr in sizes for each in numbers)


class WholeStep:
    """What Dynamo calls in place of a region that was declined."""

    def __init__(self, module: fx.GraphModule, lowering: RegionLowering, record: RegionRecord) -> None:
        """module: a graph of Dynamo's, ours to keep."""
        self._eager, self._record = module.forward, record
        unread, parts = unread_statistics(module.graph), None
        if lowering.gradients is None:
            parts = parts_in_outputs(module.graph)
        later = copied(module)
        sizes_from_tensors(later, "example_value")
        fakes = [node.meta.get("example_value") for node in later.graph.nodes if node.op == "placeholder"]
        self._inputs = read_inputs(later, len(fakes))
        self._step = CompiledStep(later, [symbolic_dims(fakes[index]) for index in self._inputs], lowering, record)
        self._twice = TwiceDifferentiable(self._run, self._eager, unread, record, parts)
        self._ready = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the region."""
        if not self._ready:
            self._ready = self._step.is_compiled(self._arguments(inputs))
            if not self._ready:
                self._record.steps_meanwhile += 1
                return tuple(self._eager(*inputs))
        return self._twice(*inputs)

    def _run(self, *inputs: Any) -> Sequence[Any]:
        return self._step(self._arguments(inputs))

    def _arguments(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[index] for index in self._inputs]
