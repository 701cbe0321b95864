"""Convolutions over images with the channels innermost in memory, in a graph that runs operator by operator.

oneDNN and cuDNN convolve fastest so, and pooling, norms and sums keep the layout of what they are given. A script would
call `to(memory_format=torch.channels_last)` for it, and could then call `view` on no image any more. Here the graph is
rewritten instead: weights, inputs and outputs keep the layout that they have in eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepytorch.passes.base import Context, Decline, Pass, Rewrite
from deepytorch.passes.graphs import is_random
from deepytorch.passes.slicing import Slicer

aten = torch.ops.aten

CONVOLUTIONS = frozenset(
    {
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.convolution.default,
        aten.conv_transpose2d.input,
    }
)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
# Operators that share memory with what they are given, unless its layout makes them copy.
_MAY_COPY = frozenset({*_VIEWS, aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default})
# Operators whose results depend on where in memory a value stands.
_OF_STRIDES = frozenset(
    {"as_strided", "as_strided_", "set_", "resize_", "resize_as_", "view_as_real", "view_as_complex"}
)
_LEAST = 2  # convolutions; with one, such as the patches of a vision transformer, nothing is gained


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Gives each convolution of a graph its image in the memory format `torch.channels_last`.

    A value that leaves the graph, or of which numbers are drawn, is given the layout of eager again.
    """

    def concerns(self, module: fx.GraphModule) -> bool:
        """Return whether the graph has convolutions enough."""
        return sum(node.target in CONVOLUTIONS for node in module.graph.nodes) >= _LEAST

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Rewrite all convolutions, or none if some value's layout or memory is part of what the graph means."""
        graph, rewrite = module.graph, Rewrite()
        found = _refusal(graph)
        if found is not None:
            rewrite.declined.append(found)
            return rewrite
        number = 0
        for node in list(graph.nodes):
            if node.target in _VIEWS:  # of an image it may have to copy
                node.target = aten.reshape.default
            elif node.target in CONVOLUTIONS and _is_image(node.args[0]):
                number += 1
                with graph.inserting_before(node):
                    node.update_arg(0, _laid_out(graph, node.args[0], torch.channels_last))
            elif is_random(node):
                for image in filter(_is_image, node.all_input_nodes):
                    with graph.inserting_before(node):
                        node.replace_input_with(image, _laid_out(graph, image, torch.contiguous_format))
        _keep_outputs(graph)
        rewrite.changes.append(f"{number} convolutions have the channels of their images innermost")
        return rewrite


def _refusal(graph: fx.Graph) -> Decline | None:
    """Return the node for which the graph has to stay as it is, and why."""
    memory = Slicer(graph)
    for node in graph.nodes:
        name = getattr(node.target, "_schema", None)
        if name is not None and name.name.rpartition("::")[2] in _OF_STRIDES:
            return Decline(node.name, f"{node.target} depends on the layout in memory")
        if name is not None and not name.name.startswith(("aten::", "prims::")) and any(map(_is_image, node.args)):
            return Decline(node.name, f"{node.target} is an operator of the script's, which may rely on a layout")
        if node.target in _MAY_COPY and memory.is_written(node):
            return Decline(node.name, f"{node.target} is of memory that is written to")
    for output in _outputs(graph):
        value = output.meta.get("val")
        if output.op != "placeholder" and isinstance(value, torch.Tensor) and not value.is_contiguous():
            return Decline(output.name, "an output has a layout of its own")
    return None


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return list(next(node for node in graph.nodes if node.op == "output").all_input_nodes)


def _keep_outputs(graph: fx.Graph) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    for node in _outputs(graph):
        value = node.meta.get("val")
        if node.op != "placeholder" and isinstance(value, torch.Tensor) and value.dim() > 1:
            with graph.inserting_before(output):
                output.replace_input_with(node, graph.call_function(aten.contiguous.default, (node,)))


def _is_image(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _laid_out(graph: fx.Graph, image: Any, layout: torch.memory_format) -> fx.Node:
    return graph.call_function(aten.contiguous.default, (image,), {"memory_format": layout})
