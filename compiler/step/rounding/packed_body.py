"""Division of a packed graph: a prologue that follows from the batch alone, and a body independent of the padded sizes.

A batch's rows are padded to another length each time, so a step that takes ids and masks as they come has other sizes
each time. Values gathered from them have as many entries as there are tokens. The body takes these values, and where
token counts are rounded (`step`) it sees only a few different sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.graphs import call, copied
from deepytorch.passes.slicing import Slicer, writes_in_place
from deepytorch.passes.unpad.region import Declined
from deepytorch.torch_internals import enter_autocast, exit_autocast, set_grad_enabled_in_graphs

aten = torch.ops.aten
_MODES = (enter_autocast, exit_autocast, set_grad_enabled_in_graphs)


@dataclass(frozen=True)
class PackedBody:
    """A packed graph in two parts.

    Both take some of its inputs; the body also takes what `prologue` makes of the batch.

    Attributes:
        prologue: has no parameters and no random numbers; returns `num_between` further inputs of the body, and then
            the outputs of the packed graph that follow from the batch alone.
        prologue_inputs: the packed graph's inputs that the prologue takes.
        body: the rest of the graph.
        body_inputs: the packed graph's inputs that the body takes, before those from the prologue.
        num_between: number of tensors that the prologue hands to the body.
        outputs: where each output of the packed graph comes from: ("body", i), ("prologue", i), where i counts these
            outputs, or ("constant", value).
        varying: for each input of the body, the dimensions whose sizes are symbols.
    """

    prologue: fx.GraphModule
    prologue_inputs: tuple[int, ...]
    body: fx.GraphModule
    body_inputs: tuple[int, ...]
    num_between: int
    outputs: tuple[tuple[str, Any], ...]
    varying: tuple[tuple[int, ...], ...]


def cut(module: fx.GraphModule, padded_sizes: Collection[sympy.Symbol]) -> PackedBody:
    """Cut the graph of `module`, whose nodes have values, in two. The graph itself stays unchanged.

    padded_sizes: the symbols of the spaces' positions.

    Raises:
        Declined: the body would have a size besides the batch's rows and those of the index inputs, or would write into
            an input.
    """
    return _Cut(module, frozenset(padded_sizes)).made()


class _Cut:
    def __init__(self, module: fx.GraphModule, padded_sizes: frozenset[sympy.Symbol]) -> None:
        graph = copied(module).graph
        _gather_ids_first(graph)
        self._module, self._graph = module, graph
        self._slicer = Slicer(graph)
        if self._slicer.writes_inputs:
            raise Declined("the model writes into its inputs", "sizes")
        self._number = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        self._varies = self._of_the_batch()
        # the sizes that are rounded, and the number of the batch's rows
        given = [node.meta["val"] for node in self._number if node.meta["input"].role is Role.INDEX]
        self._rounded = self._symbols_of(size for value in given for size in value.shape) - padded_sizes
        self._between: list[fx.Node] = []  # nodes of the whole graph: values that the prologue gives the body
        self._carriers: list[fx.Node] = []  # likewise sizes, which are passed as tensors
        self._body = fx.Graph()
        self._in_body: dict[fx.Node, fx.Node] = {}
        self._begin = self._body.call_function(operator.pos, (0,))  # a temporary mark: inputs go before it

    def made(self) -> PackedBody:
        for node in self._graph.nodes:
            if self._is_of_the_body(node):
                self._in_body[node] = self._body.node_copy(node, self._needed)
        outputs: list[tuple[str, Any]] = []
        found: list[fx.Node] = []  # outputs that the body computes
        early: list[fx.Node] = []  # outputs that the prologue computes
        for value in next(iter(reversed(self._graph.nodes))).args[0]:  # type: ignore[union-attr]
            if not isinstance(value, fx.Node):
                outputs.append(("constant", value))
            elif value.op == "call_function" and not self._slicer.from_batch(value):
                outputs.append(("body", len(found)))
                found.append(self._in_body[value])
            elif value.op == "placeholder" and not self._slicer.from_batch(value):
                raise Declined(f"an input is an output too ({value.name})", "sizes")
            else:
                outputs.append(("prologue", len(early)))
                early.append(value)
        self._finish_body(found)
        between, carriers = ([n for n in nodes if self._is_read(n)] for nodes in (self._between, self._carriers))
        inputs = [node for node in self._number if self._is_read(node)]
        placed = [self._in_body[node] for node in (*inputs, *between, *carriers)]
        for node in reversed(placed):
            first = next(iter(self._body.nodes))
            if first is not node:
                first.prepend(node)
        prologue, taken = self._prologue(between, carriers, early)
        return PackedBody(
            prologue=prologue,
            prologue_inputs=taken,
            body=fx.GraphModule(self._module, self._body),
            body_inputs=tuple(self._number[node] for node in inputs),
            num_between=len(between) + len(carriers),
            outputs=tuple(outputs),
            varying=tuple(_symbolic(node.meta["sizes"]) for node in placed),
        )

    # ------------------------------------------------------------------ the body

    def _is_of_the_body(self, node: fx.Node) -> bool:
        """Return whether the body computes a node.

        The body computes nodes that need parameters, and nodes that follow from buffers and constants alone.
        """
        if node.op != "call_function" or node.target in _MODES:
            return node.op == "call_function"
        if isinstance(node.meta.get("val"), torch.SymInt):
            return False
        return not self._slicer.from_batch(node) or not self._varies[node]

    def _is_read(self, node: fx.Node) -> bool:
        return node in self._in_body and bool(self._in_body[node].users)

    def _needed(self, node: fx.Node) -> fx.Node:
        """Return the node of the body that stands for a node of the whole graph."""
        if node not in self._in_body:
            self._in_body[node] = self._make(node)
        return self._in_body[node]

    def _make(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            with self._body.inserting_after(self._begin):
                return self._body.node_copy(node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return self._size(node)
        if node.op == "placeholder":
            return self._input(node, node.name)
        self._between.append(node)
        return self._input(node, f"between_{len(self._between)}")

    def _size(self, node: fx.Node) -> fx.Node:
        """Return a size of the body.

        The size is read from an index input, computed from other sizes, or read from an empty tensor that carries it.
        """
        if node.target is aten.sym_size.int:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.op == "placeholder" and source.meta["input"].role is Role.INDEX:
                return self._body.node_copy(node, self._needed)
        elif node.op == "call_function" and all(
            isinstance(each.meta.get("val"), torch.SymInt) for each in node.all_input_nodes
        ):
            return self._body.node_copy(node, self._needed)
        self._carriers.append(node)
        carrier = self._input(node, f"size_{len(self._carriers)}")
        return self._body.call_function(aten.sym_size.int, (carrier, 0))

    def _input(self, node: fx.Node, name: str) -> fx.Node:
        value = node.meta["val"]
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value, 0]
        if not self._symbols_of(sizes) <= self._rounded:
            raise Declined(f"the packed step reads a value of the padded batch's size ({node.name})", "sizes")
        with self._body.inserting_before(self._begin):
            made = self._body.placeholder(name)
        made.meta["input"] = node.meta.get("input") or GraphInput(name, Role.INDEX)
        made.meta["sizes"] = sizes
        return made

    @staticmethod
    def _symbols_of(sizes: Iterable[Any]) -> set[sympy.Symbol]:
        nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
        return {symbol for node in nodes for symbol in node.shape_env.replace(node.expr).free_symbols}

    def _finish_body(self, outputs: list[fx.Node]) -> None:
        body = self._body
        body.output(tuple(outputs))
        body.erase_node(self._begin)
        body.eliminate_dead_code()
        for node in [node for node in body.nodes if node.op == "placeholder"]:
            at_pads = node.meta["input"].role is Role.INDEX and node.name.startswith("flat")
            if at_pads and any(user.target is not aten.sym_size.int for user in node.users):
                raise Declined("padded values are gathered, or gathered ones scattered, in the packed step", "sizes")
            if not node.users:
                body.erase_node(node)
        body.lint()

    # ------------------------------------------------------------------ the prologue

    def _prologue(
        self, between: list[fx.Node], carriers: list[fx.Node], outputs: list[fx.Node]
    ) -> tuple[fx.GraphModule, tuple[int, ...]]:
        """Return the graph that computes values for the body and early outputs, and the inputs that the graph takes.

        The graph returns `between`, tensors that carry the sizes `carriers`, and `outputs`.
        """
        acts = [
            n for n in self._graph.nodes if n.op == "call_function" and self._slicer.from_batch(n) and n.is_impure()
        ]
        part = set(self._slicer.slice([*between, *carriers, *outputs, *acts]))
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        taken = []
        for node in self._graph.nodes:
            if node in part or node.target in _MODES:
                made[node] = graph.node_copy(node, made.__getitem__)
                if node.op == "placeholder":
                    taken.append(self._number[node])
        device = next(n.meta["val"].device for n in self._number if n.meta["input"].role is Role.INDEX)
        carried = [
            graph.call_function(aten.empty.memory_format, ([made[node], 0],), {"device": device}) for node in carriers
        ]
        graph.output((*(made[node] for node in between), *carried, *(made[node] for node in outputs)))
        graph.lint()
        return fx.GraphModule(self._module, graph), tuple(taken)

    def _of_the_batch(self) -> dict[fx.Node, bool]:
        """Return, for each node, whether its value varies from batch to batch."""
        varies: dict[fx.Node, bool] = {}
        for node in self._graph.nodes:
            if node.op == "placeholder":
                varies[node] = node.meta["input"].role in (Role.BATCH, Role.INDEX, Role.SIZE)
            else:
                written = writes_in_place(node) or self._slicer.is_written(node)  # stays together with its writes
                varies[node] = written or any(varies[source] for source in node.all_input_nodes)
        return varies


def _symbolic(sizes: list[Any]) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt))


def _gather_ids_first(graph: fx.Graph) -> None:
    """Rewrite `table[ids][columns]` as `table[ids[columns]]`: the same rows, without all positions of the padded batch.

    Learned positions, for example, are looked up for every position, (1, positions, hidden), and only then gathered.
    """
    for node in list(graph.nodes):
        if node.target is not aten.index_select.default or node.args[1] != 0:
            continue
        looked_up, order = node.args[0], None
        if looked_up.target is aten.permute.default:
            looked_up, order = looked_up.args[0], list(looked_up.args[1])
        if looked_up.target is not aten.embedding.default or any(looked_up.args[3:]) or looked_up.kwargs:
            continue
        table, ids, *rest = looked_up.args
        last = looked_up.meta["val"].dim() - 1
        if order is None:
            order = list(range(last + 1))
        if order[-1] not in (last, -1) or any(dim < 0 for dim in order[:-1]):
            continue
        with graph.inserting_before(node):
            turned = call(graph, aten.permute.default, (ids, order[:-1]))
            taken = call(graph, aten.index_select.default, (turned, 0, node.args[2]))
            made = graph.call_function(aten.embedding.default, (table, taken, *rest))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.eliminate_dead_code()
