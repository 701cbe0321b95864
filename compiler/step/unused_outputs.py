"""The part of weights in outputs: in eager a weight whose outputs nobody used has no gradient, rather than zeros.

AOTAutograd treats an output without a gradient as one with zeros, and gives zeros to every weight behind it. An
optimizer with weight decay or momentum then moves a weight that eager leaves alone: the pooler of a BERT of which only
the tokens are used.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from deepytorch.compiler.dynamo.capture import without_grad
from deepytorch.passes.slicing import returns_alias
from deepytorch.torch_internals import OpOverload, tree_leaves


class Parts(NamedTuple):
    """The outputs, by number, in which each input of a graph has a part.

    `~place` stands for the new value of the input at that place, which the graph may write into.

    gradients: the outputs from which a gradient may come to the input. values: the outputs whose numbers may depend on
    it, detached or not. written: places of inputs that gradients may go through and that the graph writes into.
    """

    gradients: tuple[frozenset[int], ...]
    values: tuple[frozenset[int], ...]
    written: frozenset[int]


def parts_in_outputs(graph: fx.Graph) -> Parts:
    """Follow each value to the outputs, through writes in place and through memory that several nodes share."""
    memory = _Memory(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    written = frozenset(place for place, node in enumerate(inputs) if memory.is_written(node))
    return Parts(_parts(graph, memory, without_grad(graph)), _parts(graph, memory, None), written)


def _parts(graph: fx.Graph, memory: _Memory, untracked: Collection[fx.Node] | None) -> tuple[frozenset[int], ...]:
    """Return the outputs behind each input. untracked: nodes that run without gradients; None: follow the numbers."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    parts: dict[fx.Node, frozenset[int]] = {node: frozenset([~place]) for place, node in enumerate(inputs)}
    for node in reversed(graph.nodes):
        if node.op == "output":
            for number, each in enumerate(node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args):
                if isinstance(each, fx.Node):
                    parts[each] = parts.get(each, frozenset()) | {number}
            continue
        found, written = parts.get(node, frozenset()), memory.written.get(node, ())
        for each in written:  # every node that reads this memory later, by any of its names, depends on the write
            found = found.union(*(parts.get(other, ()) for other in memory.names(each)))
        sources: Collection[fx.Node] = node.all_input_nodes if found else ()
        if untracked is not None and (node in untracked or _stops_gradients(node)):
            sources = written
        for source in sources:
            parts[source] = parts.get(source, frozenset()) | found
    return tuple(parts[node] for node in inputs)


class _Memory:
    """The nodes of a graph that may share memory, and those that write there.

    written: for each node that writes, the nodes whose memory it writes into.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._names: dict[fx.Node, set[fx.Node]] = {}  # one set for all that share
        self.written: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            names = self._names.setdefault(node, {node})
            for source in node.all_input_nodes:
                if self._names[source] is not names and _may_share(node, source):
                    names |= self._names[source]
                    for each in self._names[source]:
                        self._names[each] = names
            written = _written(node)
            if written:
                self.written[node] = written

    def is_written(self, node: fx.Node) -> bool:
        """Return whether anything writes into the memory of a node."""
        return any(node in self.names(each) for written in self.written.values() for each in written)

    def names(self, node: fx.Node) -> set[fx.Node]:
        """Return the nodes that may share the memory of `node`, itself among them."""
        return self._names[node]


def _may_share(node: fx.Node, source: fx.Node) -> bool:
    """Return whether the result of a call may share the memory of its argument `source`."""
    if node.op == "output":
        return False
    if isinstance(node.target, OpOverload):
        return returns_alias(node)
    one, other = _storages(node), _storages(source)
    return one is None or other is None or bool(one & other)


def _storages(node: fx.Node) -> set[int] | None:
    """Return the storages of a node's value; None if they are not known."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None:
        return None
    try:
        return {each.untyped_storage()._cdata for each in tree_leaves(value) if isinstance(each, torch.Tensor)}
    except (NotImplementedError, RuntimeError):  # sparse, nested, of a transform's
        return None


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that gradients may go through and that a call writes into."""
    found: list[Any] = []
    graphs = _graphs_called(node)
    if graphs:
        found = list(node.all_input_nodes) if any(parts_in_outputs(each.graph).written for each in graphs) else []
    elif isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments
        given = {**{one.name: each for one, each in zip(arguments, node.args, strict=False)}, **node.kwargs}
        found = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    elif node.op in ("call_method", "call_function") and _writes_by_name(node):
        found = list(node.args[:1])
    leaves = [each for every in found for each in (every if isinstance(every, (list, tuple)) else [every])]
    return [each for each in leaves if isinstance(each, fx.Node) and not _is_without_gradient(each)]


def _writes_by_name(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    if name in ("setitem", "set_item") or bool(node.kwargs.get("inplace")):
        return True
    return (name.endswith("_") and name not in ("and_", "or_", "not_", "is_")) or name in _AUGMENTED


# `operator.iadd` and its like: what `+=` becomes in a graph
_AUGMENTED = frozenset({
    "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imod", "imul", "imatmul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor",
})  # fmt: skip


def _graphs_called(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs nested in this one that a call runs: a checkpointed part, for example."""
    named = [each for each in (node, *node.all_input_nodes) if each.op in ("get_attr", "call_module")]
    parts = [getattr(node.graph.owning_module, str(each.target), None) for each in named]
    return [part for part in parts if isinstance(part, fx.GraphModule)]


def _stops_gradients(node: fx.Node) -> bool:
    """Return whether no gradient goes through a call, whatever it is given."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    detaches = name in ("detach", "detach.default") and node.op in ("call_method", "call_function")
    return detaches or _is_without_gradient(node)


def _is_without_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
