"""A graph of Dynamo's in a form that another process can compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.dynamo.capture import Untraceable, capture, sizes_from_tensors
from deepytorch.compiler.dynamo.eager_graph import holds_checkpoints
from deepytorch.passes.graphs import copied
from deepytorch.torch_internals import HigherOrderOperator


def graph_for_later(module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule | str:
    """Return Dynamo's graph in a form that Dynamo can trace once more in another process; or the reason against it.

    Checkpoints hold graphs of their own. A graph with checkpoints is returned in the form that passes read, with the
    checkpointed parts marked.
    """
    if holds_checkpoints(module):
        try:
            return capture(module, example_inputs).module
        except Untraceable as untraceable:
            return str(untraceable).partition("\n")[0]
        except Exception as error:
            return f"a trace of it failed with {type(error).__name__}: {str(error)[:200]}"
    reason = _why_not_later(module)
    if reason is not None:
        return reason
    later = copied(module)
    sizes_from_tensors(later, "example_value")
    return later


def _why_not_later(module: fx.GraphModule) -> str | None:
    """Return why Dynamo cannot trace its graph once more: it holds graphs, or numbers that are no sizes. Else None."""
    sizes = set()
    for node in module.graph.nodes:
        if node.op == "call_module":
            return f"the graph calls a module, {node.target}"
        if isinstance(node.target, HigherOrderOperator):
            return f"the graph holds another one, of {node.target.name()}"
        if node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), torch.Tensor):
            return f"the graph holds {node.target}, which is no tensor"
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            shape: Sequence[Any] = value.shape
            sizes |= {size.node.expr for size in shape if isinstance(size, torch.SymInt)}
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" or not node.users or isinstance(value, torch.Tensor):
            continue
        if not (isinstance(value, torch.SymInt) and value.node.expr in sizes):
            return f"the graph takes {node.name}, a number that is no size of the batch"
    return None
