"""Autograd's treatment of a parameter's gradient: if it accumulates the gradient, and which hooks read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepytorch.torch_internals import will_engine_execute_node


def accumulator(parameter: Tensor) -> Any:
    """Return autograd's node that adds to `parameter.grad`, also for a parameter that is frozen now."""
    with torch.enable_grad(), _trained(parameter):
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def on_accumulated(parameter: Tensor, call: Callable[[Any], None]) -> Any:
    """Call `call(parameter)` whenever autograd has accumulated the parameter's gradient.

    The parameter may be frozen now and trained later. Returns a handle with `remove()`.
    """
    with _trained(parameter):
        return parameter.register_post_accumulate_grad_hook(call)


@contextlib.contextmanager
def _trained(parameter: Tensor) -> Iterator[None]:
    """Make the parameter require a gradient inside the block: without that it has neither node nor hook."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)


def is_accumulated(node: Any) -> bool:
    """Return whether this backward adds to the gradient of a parameter, and does not only return it."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf in torch.autograd.grad
        return False


def has_hooks(parameter: Tensor) -> bool:
    """Return whether any hook other than the reducer's reads a gradient on its way."""
    ours = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks) or len(ours or ()) > 1
