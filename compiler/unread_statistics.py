"""Statistics that a graph of Dynamo's writes into and does not read (BatchNorm's): a rerun needs no copy of them."""

from __future__ import annotations

import torch
from torch import fx


def unread_statistics(graph: fx.Graph) -> frozenset[int]:
    """Return places of inputs that a graph of Dynamo's writes into, and that none of its outputs depends on."""
    found = [
        place
        for place, node in enumerate(_placeholders(graph))
        if node.users and all(_only_writes(user, node) for user in node.users)
    ]
    return frozenset(found)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _only_writes(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target == "add_" and user.args[0] is node and not user.users
    if user.target not in _STATISTICS:
        return False
    name, place = _STATISTICS[user.target]
    writes = user.kwargs.get(name, user.args[place] if len(user.args) > place else name == "use_input_stats")
    others = [*user.args[:1], *user.args[3:], *(v for k, v in user.kwargs.items() if not k.startswith("running_"))]
    return writes is True and node not in others


_STATISTICS = {
    torch.nn.functional.batch_norm: ("training", 5),
    torch.nn.functional.instance_norm: ("use_input_stats", 5),
}
