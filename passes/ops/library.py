"""Registration of deepytorch's operators: one torch library, and each operator once per process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "deepytorch"

if "LIBRARY" not in globals():  # importlib.reload runs this module again in the same namespace
    # A library that is garbage-collected removes its operators, so it lives as long as this module.
    LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    schema: str,
    kernels: Mapping[str, Callable[..., Any]],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,),
    flops: Callable[..., int] | None = None,
) -> None:
    """Register an operator, unless this process already has it.

    Args:
        schema: `"name(arguments) -> results"`.
        kernels: what computes it, by dispatch key.
        fake: its results' shapes and dtypes, on fake tensors.
        backward: its formula for autograd.
        setup_context: saves what `backward` needs.
        tags: of the operator.
        flops: its floating-point operations, given its arguments with shapes in place of tensors: for
            `torch.utils.flop_counter`, by which torch's partitioner judges what to compute again in a backward.
    """
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    LIBRARY.define(schema, tags=tags)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    qualified = f"{NAMESPACE}::{name}"
    if fake is not None:
        torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)
    if flops is not None:
        register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name))(flops)
