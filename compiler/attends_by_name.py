"""Whether a module attends, as far as names tell: asked before anything is traced, and only for what may be wrong."""

from __future__ import annotations

from torch import nn


def attends_by_name(module: nn.Module) -> bool:
    """Whether a class of a module in it is called attention: `LlamaAttention`, `MultiheadAttention`, `SelfAttn`."""
    names = {type(each).__name__.lower() for each in module.modules()}
    return any("attention" in name or "attn" in name for name in names)
