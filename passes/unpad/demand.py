"""Which entries of a value anybody can see.

Backward through the graph: `NOTHING` < the entries that one loss looks at < `TOKENS` < `EVERYTHING`. What stands at
padded positions is seen by nobody when a value only meets masked keys, losses whose labels are ignored there, masks
that zero it, picks of real tokens, and outputs of one entry a token (what Python does with them is seen at run time).
Every other operator sees everything, so its inputs must be padded and exact, and what feeds them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.layout import Layout, is_token
from deepytorch.passes.unpad.rules import Rule, is_random, rule_for, tensor_inputs

_NOTHING, _LOSS, _TOKENS, _EVERYTHING = range(4)


@dataclass(frozen=True)
class Demand:
    """How much of a value is seen; `loss` numbers the loss where only its labelled entries are."""

    level: int
    loss: int | None = None

    def __or__(self, other: Demand) -> Demand:
        if self.level == other.level == _LOSS and self.loss != other.loss:
            return TOKENS
        return self if self.level >= other.level else other

    @property
    def packable(self) -> bool:
        """Whether padded positions are seen by nobody."""
        return self.level <= _TOKENS


NOTHING = Demand(_NOTHING)
TOKENS = Demand(_TOKENS)
EVERYTHING = Demand(_EVERYTHING)


def labelled(loss: int) -> Demand:
    """Only the entries whose label loss number `loss` does not ignore."""
    return Demand(_LOSS, loss)


@dataclass
class Seen:
    """What `demands` needs to know of a graph beyond its nodes."""

    layouts: Mapping[fx.Node, Layout]
    from_batch: Mapping[fx.Node, bool]
    attentions: Mapping[fx.Node, Attention]  # by output node, those whose mask is known
    losses: Mapping[fx.Node, int]  # loss node -> its number
    loss_rows: bool  # whether losses leave out the rows whose label is ignored
    token_outputs: frozenset[fx.Node]  # outputs that may leave the region with their tokens alone
    biases: Mapping[fx.Node, tuple[fx.Node, ...]]  # attention's output -> what is added to its scores
    unreduced: frozenset[fx.Node]  # losses with a value for every token
    picks: Mapping[fx.Node, int]  # node that takes one token a row -> its number
    zero_at_pads: frozenset[fx.Node]  # their padded entries are zeros, whatever their inputs hold there
    deferred: frozenset[fx.Node]  # outputs that are computed later, if at all
    keep_tokens: frozenset[fx.Node] = frozenset()  # seen at every token, although only a loss asks
    refused: dict[fx.Node, str] = field(default_factory=dict)  # filled in: token values whose operator has no rule


def demands(graph: fx.Graph, seen: Seen) -> dict[fx.Node, Demand]:
    """The demand on every node of `graph`."""
    demand: dict[fx.Node, Demand] = dict.fromkeys(graph.nodes, NOTHING)
    inside = {
        node: output for output, attention in seen.attentions.items() for node in attention.inner if node is not output
    }
    for node in reversed(list(graph.nodes)):
        if node in inside and demand[inside[node]].packable:
            continue  # the packed attention takes its place
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
    """What a node that is demanded so much demands of its inputs."""
    attention = seen.attentions.get(node)
    if attention is not None and demand.packable:
        yield from ((source, TOKENS) for source in (attention.query, attention.key, attention.value))
        yield from ((bias, EVERYTHING) for bias in seen.biases[node])
        return
    if node in seen.losses:
        all_tokens = by_token(node, demand, seen) or not seen.loss_rows
        wanted = TOKENS if all_tokens else labelled(seen.losses[node])
        yield from ((source, wanted if source is node.args[0] else EVERYTHING) for source in node.all_input_nodes)
        return
    if node in seen.picks:
        for source in node.all_input_nodes:
            yield source, TOKENS if source is node.args[0] else EVERYTHING
        return
    rule = admitted_rule(node, seen)
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
    """Whether an unreduced loss may run on all tokens: nobody sees it at pads, so its labels there do not matter."""
    return node in seen.unreduced and demand.packable and bool(seen.attentions)


def admitted_rule(node: fx.Node, seen: Seen) -> Rule | None:
    """The rule that packs this node, if its output has one entry a token and its operator works token by token."""
    rule = rule_for(node)
    if rule is None:
        return None
    several = isinstance(node.meta.get("val"), (list, tuple))
    if not several and not is_token(seen.layouts.get(node)):
        return None
    return rule if rule.admits(node, seen.layouts, seen.from_batch) else None


def _refuse(node: fx.Node, seen: Seen) -> None:
    """Remember the first reason why token values must stay padded: an operator that looks across positions."""
    if any(is_token(seen.layouts.get(source)) and not seen.from_batch[source] for source in tensor_inputs(node)):
        seen.refused.setdefault(node, str(node.target))


def random_nodes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that draw random numbers."""
    return [node for node in nodes if is_random(node)]


def is_float(node: fx.Node) -> bool:
    """Whether a node's value is a floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
