"""Backward outputs that are gradients of a data-parallel module go into its buckets, as soon as they are there.

Each bucket's start stands right behind the last of its gradients, all waits at the end, so that what is sent travels
while the rest of the backward runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from deepytorch.passes.ops import reduce  # noqa: F401, registers the operators


@dataclass(frozen=True)
class ReduceGradients:
    """A graph pass for the graphs behind AOTAutograd; forwards, which have no such outputs, stay as they are.

    reducer: the name that the operators look the reducer up by. members: (graph input, member of the bucket plan) for
    every parameter among the inputs. bucket_of: the bucket of each member. digest: of the bucket plan, for cache keys.
    """

    reducer: str
    members: tuple[tuple[int, int], ...]
    bucket_of: tuple[int, ...]
    digest: str

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place."""
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        places = _gradients(output, dict(self.members))
        if not places:
            return
        [results] = output.args
        found = {member: results[place] for member, place in places.items()}
        order = {node: place for place, node in enumerate(graph.nodes)}
        buckets: dict[int, list[tuple[int, fx.Node]]] = {}
        for member, gradient in found.items():
            buckets.setdefault(self.bucket_of[member], []).append((member, gradient))
        started = []
        for number in sorted(buckets):
            entries = sorted(buckets[number], key=lambda entry: order[entry[1]])
            with graph.inserting_after(entries[-1][1]):
                started.append(
                    _call(graph, "reduce_start", [node for _, node in entries], [member for member, _ in entries], self)
                )
        members = list(found)
        handed = list(results)
        with graph.inserting_before(output):
            waited = _call(graph, "reduce_wait", started, members, self)
            for number, member in enumerate(members):
                handed[places[member]] = _item(graph, waited, number)
        output.args = (type(results)(handed),)
        _keep_layouts(output, places.values())


def _gradients(output: fx.Node, members: Mapping[int, int]) -> dict[int, int]:
    """Member -> which of the outputs is its gradient."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    found: dict[int, int] = {}
    [results] = output.args
    for place, (node, description) in enumerate(zip(results, output.meta.get("desc") or (), strict=False)):
        if not isinstance(node, fx.Node) or not isinstance(description, GradAOTOutput):
            continue
        source = description.grad_of
        if isinstance(source, PlainAOTInput) and source.idx in members:
            found[members[source.idx]] = place
    return found


def _keep_layouts(output: fx.Node, places: Iterable[int]) -> None:
    """Inductor gives every output the strides that it had in the trace, by a copy if need be: these are as they are."""
    strides = output.meta.get("original_output_strides")
    if strides is None:
        return
    [results] = output.args
    changed = list(strides)
    for place in places:
        changed[place] = tuple(results[place].meta["val"].stride())
    output.meta["original_output_strides"] = changed


def _call(
    graph: fx.Graph, name: str, tensors: Sequence[fx.Node], members: Sequence[int], told: ReduceGradients
) -> fx.Node:
    target = getattr(torch.ops.deepytorch, name).default
    node = graph.call_function(target, (list(tensors), list(members), told.reducer))
    values = [tensor.meta["val"] for tensor in tensors]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is not None:
        with mode:
            node.meta["val"] = target(values, list(members), told.reducer)
    return node


def _item(graph: fx.Graph, waited: fx.Node, place: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (waited, place))
    if "val" in waited.meta:
        node.meta["val"] = waited.meta["val"][place]
    return node
