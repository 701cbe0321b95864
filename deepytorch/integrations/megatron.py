"""Megatron-LM: its fused functions are compiled by deepytorch.

Megatron-LM decorates these functions with `megatron.core.jit.jit_fuser`, which is `torch.compile` under another name.
Our function replaces `jit_fuser` before other modules of Megatron-LM import it; `disable_jit_fuser` and
`enable_jit_fuser` work as before. Megatron-LM's models are left alone: Dynamo would cut them into dozens of graphs at
their tensor and pipeline parallel layers, and they pack sequences themselves.
"""

from __future__ import annotations

from typing import Any

from deepytorch.patches import replace


def attach(jit: Any) -> None:
    """Take over `jit_fuser` if it is `torch.compile`. `jit`: megatron.core.jit."""
    from deepytorch import autowrap

    autowrap.LEFT_ALONE["megatron"] = "models of Megatron-LM are left as they are; its fused functions are compiled."
    enable = getattr(jit, "enable_jit_fuser", None)
    if not _is_compile(getattr(jit, "jit_fuser", None)):
        return
    replace(jit, "jit_fuser", lambda _: compile_fused, "compile Megatron-LM's fused functions")
    if enable is None:
        return

    def enabling(original: Any) -> Any:
        def enable_jit_fuser() -> None:
            original()
            if _is_compile(jit.jit_fuser):
                jit.jit_fuser = compile_fused

        return enable_jit_fuser

    replace(jit, "enable_jit_fuser", enabling, "keep compiling them when Megatron-LM switches its fuser on again")


def compile_fused(function: Any = None, **kwargs: Any) -> Any:
    """Apply `torch.compile(function, backend="deepytorch")`, as a decorator with or without arguments."""
    import torch

    return torch.compile(function, **{"backend": "deepytorch", **kwargs})


def _is_compile(function: Any) -> bool:
    import torch

    return function is torch.compile
