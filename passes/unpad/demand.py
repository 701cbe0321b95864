"""Demand analysis: which entries of each value can be seen.

Demand flows backward through the graph: `NOTHING` < the entries that one loss reads < `TOKENS` < `EVERYTHING`. The
entries of a value at pads are not seen if the value only meets masked keys, losses whose labels are ignored there,
masks that zero it, picks of real tokens, and outputs with one entry per token (what Python does with such outputs is
observed at run time). Every other operator sees everything. Its inputs, and all that they are computed from, must
therefore be padded and exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.layout import Layout, is_token
from deepytorch.passes.unpad.routing import Routed
from deepytorch.passes.unpad.rules import Rule, rule_for, tensor_inputs

_NOTHING, _LOSS, _TOKENS, _EVERYTHING = range(4)


@dataclass(frozen=True)
class Demand:
    """The amount of a value that is seen.

    loss: the number of a loss, if only that loss's labelled entries are seen.
    """

    level: int
    loss: int | None = None

    def __or__(self, other: Demand) -> Demand:
        if self.level == other.level == _LOSS and self.loss != other.loss:
            return TOKENS
        return self if self.level >= other.level else other

    @property
    def packable(self) -> bool:
        """Return whether padded positions are not seen."""
        return self.level <= _TOKENS


NOTHING = Demand(_NOTHING)
TOKENS = Demand(_TOKENS)
EVERYTHING = Demand(_EVERYTHING)


def labelled(loss: int) -> Demand:
    """Return the demand for only the entries whose label loss number `loss` does not ignore."""
    return Demand(_LOSS, loss)


@dataclass
class Seen:
    """The facts about a graph, beyond its nodes, that `demands` needs."""

    layouts: Mapping[fx.Node, Layout]
    from_batch: Mapping[fx.Node, bool]
    attentions: Mapping[fx.Node, Attention]  # by output node; only attentions whose mask is understood
    losses: Mapping[fx.Node, int]  # loss node -> its number
    loss_rows: bool  # whether losses skip the rows whose label is ignored
    token_outputs: frozenset[fx.Node]  # outputs that may leave the region packed, with tokens only
    biases: Mapping[fx.Node, tuple[fx.Node, ...]]  # attention's output -> the terms added to its scores
    unreduced: frozenset[fx.Node]  # losses that return a value for every token
    picks: Mapping[fx.Node, int]  # node that takes one token per row -> its number
    zero_at_pads: frozenset[fx.Node]  # values that are zero at pads, whatever their inputs hold there
    sums: frozenset[fx.Node]  # sums by index to which pads add zeros
    deferred: frozenset[fx.Node]  # outputs that are computed at their first use, if ever
    routed: Mapping[fx.Node, Routed] = field(default_factory=dict)  # the rules of nodes that move entries
    order_of: Mapping[fx.Node, fx.Node] = field(default_factory=dict)  # the sort whose entries a node holds or moves
    written: frozenset[fx.Node] = frozenset()  # values in memory that the model writes into: they stay padded
    keep_tokens: frozenset[fx.Node] = frozenset()  # values computed at every token, although only a loss demands them
    refused: dict[fx.Node, str] = field(default_factory=dict)  # filled in: token values whose operator has no rule


def demands(graph: fx.Graph, seen: Seen) -> dict[fx.Node, Demand]:
    """Return the demand on every node of `graph`."""
    demand: dict[fx.Node, Demand] = dict.fromkeys(graph.nodes, NOTHING)
    inside = {
        node: output for output, attention in seen.attentions.items() for node in attention.inner if node is not output
    }
    kept = {seen.order_of[node] for node in seen.keep_tokens if node in seen.order_of}
    for node in reversed(list(graph.nodes)):
        if node in inside and demand[inside[node]].packable:
            continue  # the packed attention replaces this node
        if seen.order_of.get(node) in kept and demand[node] != NOTHING:
            demand[node] |= TOKENS  # all that a sort moves is computed for the same tokens
        if node.op == "output":
            for source in node.all_input_nodes:
                demand[source] |= _output_demand(source, seen)
        elif node.op == "call_function" and (demand[node].level > _NOTHING or node.is_impure()):
            for source, wanted in _inputs(node, demand[node], seen):
                demand[source] |= wanted
    return demand


def _output_demand(node: fx.Node, seen: Seen) -> Demand:
    if node in seen.deferred:
        return NOTHING
    if node in seen.token_outputs:
        return TOKENS
    return EVERYTHING


def _inputs(node: fx.Node, demand: Demand, seen: Seen) -> Iterable[tuple[fx.Node, Demand]]:
    """Yield the demand on each input of a node, given the demand on the node."""
    attention = seen.attentions.get(node)
    if attention is not None and demand.packable:
        yield from ((source, TOKENS) for source in (attention.query, attention.key, attention.value))
        yield from ((bias, EVERYTHING) for bias in seen.biases[node])
        if attention.sinks is not None:
            yield attention.sinks, TOKENS if is_token(seen.layouts.get(attention.sinks)) else EVERYTHING
        return
    if node in seen.losses:
        all_tokens = by_token(node, demand, seen) or not seen.loss_rows
        wanted = TOKENS if all_tokens else labelled(seen.losses[node])
        yield from ((source, wanted if source is node.args[0] else EVERYTHING) for source in node.all_input_nodes)
        return
    if node in seen.sums:
        for source in node.all_input_nodes:
            yield source, TOKENS if source is node.args[2] else EVERYTHING
        return
    if node in seen.picks:
        for source in node.all_input_nodes:
            yield source, TOKENS if source is node.args[0] else EVERYTHING
        return
    rule = admitted_rule(node, seen)
    if isinstance(rule, Routed) and demand.packable:
        yield from ((source, demand) for source in rule.reads)
        yield from ((source, EVERYTHING) for source in rule.whole)
        return
    if rule is None:
        _refuse(node, seen)
        yield from ((source, EVERYTHING) for source in node.all_input_nodes)
        return
    if node in seen.zero_at_pads and not demand.packable:
        demand = TOKENS
    if demand.level == _LOSS and (node in seen.keep_tokens):
        demand = TOKENS
    for source in node.all_input_nodes:
        token = is_token(seen.layouts.get(source)) or isinstance(source.meta.get("val"), (list, tuple))
        yield source, demand if token else EVERYTHING


def by_token(node: fx.Node, demand: Demand, seen: Seen) -> bool:
    """Return whether an unreduced loss may run on all tokens.

    Such a loss is not seen at pads, so that its labels there do not matter.
    """
    return node in seen.unreduced and demand.packable and bool(seen.attentions)


def admitted_rule(node: fx.Node, seen: Seen) -> Rule | None:
    """Return the rule that packs this node, or None.

    The node's output must have one entry per token, and its operator must work token by token.
    """
    if node in seen.routed:
        return seen.routed[node]
    rule = rule_for(node)
    if rule is None or node in seen.written:
        return None
    several = isinstance(node.meta.get("val"), (list, tuple))
    if not several and not is_token(seen.layouts.get(node)):
        return None
    return rule if rule.admits(node, seen.layouts, seen.from_batch) else None


def _refuse(node: fx.Node, seen: Seen) -> None:
    """Record the first reason why token values must stay padded: an operator that may look across positions."""
    if any(is_token(seen.layouts.get(source)) and not seen.from_batch[source] for source in tensor_inputs(node)):
        seen.refused.setdefault(node, str(node.target))


def is_float(node: fx.Node) -> bool:
    """Return whether a node's value is a floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
