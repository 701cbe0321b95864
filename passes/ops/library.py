"""Registration of deepytorch's operators: one torch library, and each operator once per process."""

from __future__ import annotations

import torch

NAMESPACE = "deepytorch"

if "LIBRARY" not in globals():  # importlib.reload runs this module again in the same namespace
    # A library that is garbage-collected removes its operators, so it lives as long as this module.
    LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_once(schema: str, tags: tuple[torch.Tag, ...] = ()) -> bool:
    """Define the operator of `schema`, `"name(arguments) -> results"`; return False if this process already has it."""
    if hasattr(getattr(torch.ops, NAMESPACE), schema.partition("(")[0]):
        return False
    LIBRARY.define(schema, tags=tags)
    return True


def qualified(name: str) -> str:
    """Return the operator's name with its namespace, as `torch.library` takes it."""
    return f"{NAMESPACE}::{name}"
