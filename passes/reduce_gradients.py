"""A pass that puts gradients of a data-parallel module into its buckets as soon as a backward graph has computed them.

Successive gradients are handed over in groups. The start of a group's reduction stands right after the group's last
gradient, and all waits stand at the end of the graph. Which groups make a bucket is decided at run time
(`comm.gradients`), so that a graph does not depend on it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from deepytorch.passes.embedding_rows import EmbeddingRows, embedding_rows
from deepytorch.passes.graphs import call
from deepytorch.passes.ops import reduce  # noqa: F401, registers the operators

_OPS = torch.ops.deepytorch
_MAX_GROUPS = 48  # approximate limit: each group costs the host some 20 us


@dataclass(frozen=True)
class ReduceGradients:
    """A pass for the graphs after AOTAutograd. Forward graphs have no gradients among their outputs and stay unchanged.

    reducer: the name by which the operators look the reducer up. members: (graph input, member of the bucket plan) for
    every parameter among the inputs.
    """

    reducer: str
    members: tuple[tuple[int, int], ...]

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place."""
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        places = _gradients(output, dict(self.members))
        if not places:
            return
        [results] = output.args
        order = {node: place for place, node in enumerate(graph.nodes)}
        rows = {member: embedding_rows(results[place]) for member, place in places.items()}
        whole = [(member, results[place]) for member, place in places.items() if rows[member] is None]
        started = []
        for group in _groups(sorted(whole, key=lambda each: order[each[1]])):
            gradients = [node for _, node in group]
            with graph.inserting_after(gradients[-1]):
                started.append(
                    call(graph, _OPS.reduce_start.default, (gradients, [member for member, _ in group], self.reducer))
                )
        for member, found in rows.items():
            if found is not None:
                started += self._start_rows(graph, member, found, order)
        handed = list(results)
        with graph.inserting_before(output):
            waited = call(graph, _OPS.reduce_wait.default, (started, list(places), self.reducer))
            for number, place in enumerate(places.values()):
                handed[place] = _item(graph, waited, number)
        output.args = (type(results)(handed),)
        _keep_layouts(output, places.values())

    def _start_rows(
        self, graph: fx.Graph, member: int, found: EmbeddingRows, order: Mapping[fx.Node, int]
    ) -> list[fx.Node]:
        part = None
        if found.rest is not None:
            with graph.inserting_after(found.rest):
                part = call(graph, _OPS.reduce_part.default, (found.rest, member, self.reducer))
        inputs = [node for node in (found.ids, found.values, found.kept, found.rest) if node is not None]
        last, kept = max(inputs, key=order.__getitem__), found.kept
        if last is found.rest and part is not None:
            last = part
        if found.padding is not None:
            with graph.inserting_after(last):
                last = kept = call(graph, torch.ops.aten.ne.Scalar, (found.ids, found.padding))
        with graph.inserting_after(last):
            rows = call(graph, _OPS.reduce_rows.default, (found.ids, found.values, kept, part, member, self.reducer))
        return [rows] if part is None else [part, rows]


def _groups(came: Sequence[tuple[int, fx.Node]]) -> list[list[tuple[int, fx.Node]]]:
    """Group gradients in the order in which they are computed.

    A group grows while it is small relative to the sum of all gradients.
    """
    sizes = [_num_bytes(node.meta["val"]) for _, node in came]
    found: list[list[tuple[int, fx.Node]]] = []
    filled = 0
    for entry, size in zip(came, sizes, strict=True):
        if not found or filled + size > sum(sizes) / _MAX_GROUPS:
            found.append([])
            filled = 0
        found[-1].append(entry)
        filled += size
    return found


def _num_bytes(value: torch.Tensor) -> int:
    return int(value.numel()) * value.element_size()


def _gradients(output: fx.Node, members: Mapping[int, int]) -> dict[int, int]:
    """Return, for each member of the bucket plan, which output of the graph is its gradient."""
    from deepytorch.torch_internals import GradAOTOutput, PlainAOTInput

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
    """Record the outputs' present strides as those that Inductor must produce.

    Inductor gives every output the strides that the output had in the trace, by a copy if necessary. The buckets'
    strides need no copy.
    """
    strides = output.meta.get("original_output_strides")
    if strides is None:
        return
    [results] = output.args
    changed = list(strides)
    for place in places:
        changed[place] = tuple(results[place].meta["val"].stride())
    output.meta["original_output_strides"] = changed


def _item(graph: fx.Graph, waited: fx.Node, place: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (waited, place))
    if "val" in waited.meta:
        node.meta["val"] = waited.meta["val"][place]
    return node
