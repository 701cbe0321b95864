"""Convolutions over images with the channels innermost in memory, in a graph that runs operator by operator.

oneDNN convolves large images fastest so, and pooling, norms and sums keep the layout of what they are given. A script
would call `to(memory_format=torch.channels_last)` for it, and could then call `view` on no image any more. Here the
graph is rewritten instead: weights, inputs and outputs keep the layout that they have in eager.

[Note: Small images]
With the channels last oneDNN reorders the weight and its gradient at each call, slowly: 256 channels into 256 over
3 x 8 x 8 pixels take 13 ms a step so and 7 ms otherwise, 64 into 64 over 3 x 32 x 32 pixels 6 and 10 ms (two cores).
So a convolution gets its image with the channels last if the image has as many numbers as the weight, and otherwise as
in eager. One of 1 x 1 pixels, which is equally fast either way, takes its image as it comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepytorch.passes.base import Context, Decline, Pass, Rewrite
from deepytorch.passes.graphs import is_random, keeps_all
from deepytorch.passes.slicing import Slicer, storage_roots

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
        layouts = {node: layout for node in graph.nodes if (layout := _layout(node)) is not None}
        number = sum(layout is torch.channels_last for layout in layouts.values())
        if number < _LEAST:
            rewrite.declined.append(Decline("region", "its images are smaller than the weights of their convolutions"))
            return rewrite
        for node in _lead_to(graph, {node for node in layouts if layouts[node] is torch.channels_last}):
            node.kwargs = {"memory_format": torch.channels_last}
        for node in list(graph.nodes):
            if node.target in _VIEWS:  # of an image it may have to copy
                node.target = aten.reshape.default
            elif node in layouts:
                with graph.inserting_before(node):
                    node.update_arg(0, _laid_out(graph, node.args[0], layouts[node]))
            elif is_random(node) and not keeps_all(node):
                for image in filter(_is_image, node.all_input_nodes):
                    with graph.inserting_before(node):
                        node.replace_input_with(image, _laid_out(graph, image, torch.contiguous_format))
        _keep_outputs(graph)
        rewrite.changes.append(f"{number} convolutions have the channels of their images innermost")
        return rewrite


def _layout(node: fx.Node) -> torch.memory_format | None:
    """Return the layout that a convolution's image is to have; None for other nodes, and where it makes no difference.

    See [Note: Small images].
    """
    if node.target not in CONVOLUTIONS or not _is_image(node.args[0]) or not _is_image(node.args[1]):
        return None
    weight = _sizes(node.args[1])
    if weight[2:] == [1, 1]:
        return None
    is_large = math.prod(_sizes(node.args[0])) >= math.prod(weight)
    return torch.channels_last if is_large else torch.contiguous_format


def _sizes(node: Any) -> list[int]:
    """Return the sizes of a tensor, of the batch that is traced where they are symbols: no guard depends on them."""
    return [(size.node.hint or 1) if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]


def _lead_to(graph: fx.Graph, convolutions: set[fx.Node]) -> list[fx.Node]:
    """Return the calls of `contiguous` on images that reach one of these convolutions by way of images only.

    Their copies would be copied back.
    """
    found, leads = [], set(convolutions)
    for node in reversed(graph.nodes):
        if node not in leads:
            continue
        if node.target is aten.contiguous.default and not node.kwargs and len(node.args) == 1:
            found.append(node)
        images = [node.args[0]] if node.target in CONVOLUTIONS else node.all_input_nodes
        for source in filter(_is_image, images):
            if source.op == "call_function" and source.target not in CONVOLUTIONS:
                leads.add(source)
    return found


def _refusal(graph: fx.Graph) -> Decline | None:
    """Return the node for which the graph has to stay as it is, and why."""
    memory = Slicer(graph)
    for node in graph.nodes:
        if "recompute" in node.meta:
            return Decline(node.name, "it is computed again in the backward, and operator by operator it would be kept")
        name = getattr(node.target, "_schema", None)
        if name is not None and name.name.rpartition("::")[2] in _OF_STRIDES:
            return Decline(node.name, f"{node.target} depends on the layout in memory")
        if name is not None and not name.name.startswith(("aten::", "prims::")) and any(map(_is_image, node.args)):
            return Decline(node.name, f"{node.target} is an operator of the script's, which may rely on a layout")
        if node.target in _MAY_COPY and memory.is_written(node):
            return Decline(node.name, f"{node.target} is of memory that is written to")
    roots, seen = storage_roots(graph), set[fx.Node]()
    for output in _outputs(graph):
        value = output.meta.get("val")
        if roots[output].op != "placeholder" and _is_image(roots[output]):
            if roots[output] in seen:
                return Decline(output.name, "it shares its memory with another output")
            seen.add(roots[output])
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
