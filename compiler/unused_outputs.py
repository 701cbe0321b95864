"""Which weights have a part in which outputs: a weight whose outputs nobody used has no gradient in eager, not zeros.

AOTAutograd takes an output without a gradient for one with zeros, and gives zeros to every weight behind it. An
optimizer with weight decay or momentum then moves what eager leaves alone: the pooler of a BERT whose tokens are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.torch_internals import OpOverload

Parts = tuple[frozenset[int], ...]


def parts_in_outputs(graph: fx.Graph) -> Parts | None:
    """For every input of a graph the outputs that may depend on it; None where writes in place hide that."""
    outputs = list(next(iter(reversed(graph.nodes))).args[0])
    parts: dict[fx.Node, frozenset[int]] = {}
    for number, node in enumerate(outputs):
        if isinstance(node, fx.Node):
            parts[node] = parts.get(node, frozenset()) | {number}
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if _writes(node):
            return None
        found = parts.get(node, frozenset())
        if found:
            for source in node.all_input_nodes:
                parts[source] = parts.get(source, frozenset()) | found
    return tuple(parts.get(node, frozenset()) for node in graph.nodes if node.op == "placeholder")


def _writes(node: fx.Node) -> bool:
    """Whether a call writes into a tensor that gradients may go through."""
    if node.op == "call_method":
        name = str(node.target)
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    elif isinstance(node.target, OpOverload):
        writes = node.target._schema.is_mutable
    else:
        name = getattr(node.target, "__name__", "")
        writes = name in ("setitem", "copy_") or bool(node.kwargs.get("inplace")) or name.startswith("i")
        writes = writes and name not in (
            "is_",
            "is_not",
            "invert",
            "index",
            "isinstance",
            "is_contiguous",
            "interpolate",
        )
    if not writes or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    written = node.args[0].meta.get("example_value", node.args[0].meta.get("val"))
    return not (isinstance(written, torch.Tensor) and not written.is_floating_point() and not written.is_complex())


def with_zeros(node: Any, gradients: Sequence[Any], differentiable: Sequence[bool]) -> list[Any]:
    """Gradients as AOTAutograd expects them: zeros where an output that could have one has none."""
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if each is None and has else each
        for each, meta, has in zip(gradients, node._input_metadata, differentiable, strict=True)
    ]
