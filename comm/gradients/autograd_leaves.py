"""What autograd does with a parameter's gradient: whether it adds it up, and who looks at it on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepytorch.torch_internals import will_engine_execute_node


def accumulator(parameter: Tensor) -> Any:
    """Autograd's node that adds to `parameter.grad`, also of one that is frozen now."""
    with torch.enable_grad(), _trained(parameter):
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def on_accumulated(parameter: Tensor, call: Callable[[Any], None]) -> Any:
    """Have `call(parameter)` run when its gradient was added up, also once one that is frozen now is frozen no more.

    Returns a handle with `remove()`.
    """
    with _trained(parameter):
        return parameter.register_post_accumulate_grad_hook(call)


@contextlib.contextmanager
def _trained(parameter: Tensor) -> Iterator[None]:
    """Inside, the parameter needs a gradient: neither node nor hook is to be had of one that does not."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)


def is_accumulated(node: Any) -> bool:
    """Whether this backward adds to the gradient of a parameter, and does not only hand it out."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # what it says of a leaf in torch.autograd.grad
        return False


def has_hooks(parameter: Tensor) -> bool:
    """Whether anything but our own hook looks at a gradient on its way."""
    ours = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks) or len(ours or ()) > 1
