"""A guess by names if a module has attention, made before anything is traced; only for uses where it may be wrong."""

from __future__ import annotations

from torch import nn


def attends_by_name(module: nn.Module) -> bool:
    """Return whether a class in `module` is named attention: `LlamaAttention`, `MultiheadAttention`, `SelfAttn`."""
    names = {type(each).__name__.lower() for each in module.modules()}
    return any("attention" in name or "attn" in name for name in names)
