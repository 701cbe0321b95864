"""Backward slices of a graph: all nodes that a value is computed from, including in-place writes into its memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.graphs import is_random
from deepytorch.torch_internals import OpOverload

aten = torch.ops.aten


def writes_in_place(node: fx.Node) -> bool:
    """Return whether the operator writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


_MAY_ALIAS = frozenset({
    aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.dropout.default, aten.type_as.default, aten.expand_as.default,
    aten.view_as.default, aten.reshape_as.default, aten.unflatten.int, aten.chunk.default, aten.narrow.default,
})  # fmt: skip


def returns_alias(node: fx.Node) -> bool:
    """Return whether an output may share memory with an argument.

    `reshape`, `contiguous` and `to` sometimes do, and count as operators that do.
    """
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and returns_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return False
    return node.target in _MAY_ALIAS or any(result.alias_info is not None for result in node.target._schema.returns)


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return, for every node, the node whose memory it may share.

    The root of a node is the node itself, or the first of a chain of views and writes.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args and returns_alias(node) else None
        roots[node] = roots[source] if isinstance(source, fx.Node) else node
    return roots


class Slicer:
    """Backward slices of one graph, and the memory and write analysis that the slices rest on."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self._roots = storage_roots(graph)
        self._writes: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if writes_in_place(node) and node.args and isinstance(node.args[0], fx.Node):
                self._writes.setdefault(self._roots[node.args[0]], []).append(node)
        self._updates_statistics = any(_updates_statistics(node) for node in graph.nodes)
        self._from_batch: dict[fx.Node, bool] = {}
        for node in graph.nodes:
            self._from_batch[node] = self._is_from_batch(node)

    def is_written(self, node: fx.Node) -> bool:
        """Return whether any node writes into the memory that `node` may share."""
        return self._roots[node] in self._writes

    @property
    def writes_inputs(self) -> bool:
        """Return whether running the graph has a lasting effect: a write into the memory of an input."""
        return self._updates_statistics or any(root.op == "placeholder" for root in self._writes)

    def written_inputs(self) -> list[fx.Node]:
        """Return the inputs that running the graph writes to."""
        written = {root for root in self._writes if root.op == "placeholder"}
        for node in self.order:
            if _updates_statistics(node):
                written |= {
                    source for source in node.all_input_nodes if source.op == "placeholder" and _is_buffer(source)
                }
        return sorted(written, key=self.order.__getitem__)

    def cannot_pack(self) -> str | None:
        """Return the write that forbids packing, because it must not be done twice or elsewhere; None without one."""
        for root, writes in self._writes.items():
            if root.op == "placeholder" and root.meta["input"].role is Role.BATCH:
                return f"{writes[0].target} writes into the batch ({root.name})"
            if not self._from_batch[root] and root.op != "call_function":
                return f"{writes[0].target} writes in place into {root.name}, past its views or its gradient"
        return None

    def written_values(self) -> frozenset[fx.Node]:
        """Return the values that share memory with what the model computes and then writes into.

        They hold one thing before a write and another one behind it, so they stay as they are, in their order.
        """
        roots = {root for root in self._writes if not self._from_batch[root]}
        return frozenset(node for node, root in self._roots.items() if root in roots)

    def slice(self, outputs: Iterable[fx.Node], stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
        """Return the nodes that `outputs` are computed from, in the graph's order.

        The walk ends at nodes in `stop`, which are left out.
        """
        found: set[fx.Node] = set()
        todo = [node for node in outputs if node not in stop]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            todo.extend(source for source in node.all_input_nodes if source not in stop)
            todo.extend(write for write in self._writes.get(self._roots[node], ()) if write not in stop)
        return sorted(found, key=self.order.__getitem__)

    def from_batch(self, node: fx.Node) -> bool:
        """Return whether `node` depends only on the batch, buffers and constants: no parameter, nothing random."""
        return self._from_batch[node]

    def inputs_read(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the graph inputs whose values, not only their sizes, `nodes` are computed from."""
        wanted = set(nodes)
        part = self.slice(wanted)
        members = set(part)

        def is_read(node: fx.Node) -> bool:
            return node in wanted or any(u in members and u.target is not aten.sym_size.int for u in node.users)

        return [node for node in part if node.op == "placeholder" and is_read(node)]

    def _is_from_batch(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            role = node.meta["input"].role
            floats = isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].requires_grad
            return role in (Role.BATCH, Role.BUFFER, Role.SIZE, Role.INDEX) and not floats
        if node.op == "get_attr":
            return True
        if node.op != "call_function":
            return False
        target = node.target
        if isinstance(target, OpOverload):
            if is_random(node):
                return False
        else:
            if not (getattr(target, "__module__", "") or "").startswith(("_operator", "math", "torch.")):
                return False
            if "grad_enabled" in str(target) or "autocast" in str(target):
                return False
        writes = self._writes.get(self._roots[node], ())
        return all(self._from_batch.get(source, False) for source in node.all_input_nodes) and all(
            self._from_batch.get(source, True) for write in writes for source in write.all_input_nodes
        )


def _is_buffer(node: fx.Node) -> bool:
    return node.meta["input"].role is Role.BUFFER


def _updates_statistics(node: fx.Node) -> bool:
    """Return whether a node is batch normalisation in training mode.

    The node's running mean and variance change, although its schema does not say so.
    """
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.startswith("aten::") and "batch_norm" in name and any(argument is True for argument in node.args)
