"""Where gradients go from an autograd node, in a form that can be compared: a node and a number, or a leaf's id."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def edge_of(given: torch.Tensor) -> Any:
    """Where the gradient of a tensor goes, in a form that can be compared."""
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return (id(given), 0) if given.is_leaf else None


def edge_behind(copy: torch.Tensor) -> Any:
    """Where the gradient of what `copy` was copied from goes."""
    return None if copy.grad_fn is None else comparable(*copy.grad_fn.next_functions[0])


def comparable(node: Any, number: int) -> Any:
    """An edge of a node, as `edge_of` has it."""
    return (id(node.variable), 0) if type(node).__name__ == "AccumulateGrad" else (node, number)


def edges_of(node: Any, known: Collection[Any]) -> list[Any]:
    """Where the gradients that a node returns go. One that goes by an alias of a known edge's tensor, which was made to
    carry marks for Dynamo, goes to that edge.
    """
    found = []
    for each in node.next_functions:
        if each[0] is None:
            continue
        edge = comparable(*each)
        behind = each[0].next_functions
        if edge not in known and len(behind) == 1 and behind[0][0] is not None:
            beyond = comparable(*behind[0])
            edge = beyond if beyond in known else edge
        found.append(edge)
    return found
