"""The edges of an autograd node, along which its gradients go: comparable as a node and a number, or as a leaf's id."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def edge_of(given: torch.Tensor) -> Any:
    """Return the edge that the gradient of a tensor goes to; None for a tensor that is neither a result nor a leaf."""
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return (id(given), 0) if given.is_leaf else None


def edge_behind(copy: torch.Tensor) -> Any:
    """Return the edge that the gradient of the tensor behind `copy`, from which `copy` was made, goes to."""
    return None if copy.grad_fn is None else comparable(*copy.grad_fn.next_functions[0])


def comparable(node: Any, number: int) -> Any:
    """Return an edge of autograd's in the form that `edge_of` gives."""
    return (id(node.variable), 0) if type(node).__name__ == "AccumulateGrad" else (node, number)


def edges_of(node: Any, known: Collection[Any]) -> list[Any]:
    """Return the edges that the gradients of a node go to.

    An alias of a known edge's tensor, which was made to carry marks for Dynamo, stands for that edge.
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
