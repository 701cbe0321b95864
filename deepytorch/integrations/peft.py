"""PEFT: a model with learned prompts is compiled below the prompts.

`PeftModel.forward` puts virtual tokens before each row, and makes the mask and the labels longer. In a graph of the
whole, positions then are a sum of two numbers, and not the size of any input. The model below gets rows that are all
one piece, as from any script; prefix tuning gives it a cache besides, see `cached_prefix`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from deepytorch import autowrap
from deepytorch.parallel_modules import class_of

_AS_CACHE = ("PREFIX_TUNING", "CARTRIDGE")  # prompts that are given as cached keys and values


def attach(_: Any) -> None:
    """Tell `autowrap` of learned prompts, once PEFT is imported."""
    if model_below_prompts not in autowrap.BACKBONES:
        autowrap.BACKBONES.append(model_below_prompts)


def model_below_prompts(module: nn.Module) -> nn.Module | None:
    """Return the model below the learned prompts of a `PeftModel`; None for any other module."""
    is_wrapper = class_of(module).__module__.startswith("peft.")
    config = getattr(module, "active_peft_config", None) if is_wrapper else None
    if config is None or not config.is_prompt_learning:
        return None
    if config.peft_type.value in _AS_CACHE and config.task_type != "CAUSAL_LM":  # others may call what is below it
        return None
    below = module.get_base_model()  # type: ignore[operator]
    return below if isinstance(below, nn.Module) else None
