"""TRL: its fused head runs on tokens alone, since it works token by token, which cannot be seen from outside.

`SFTTrainer` and `DPOTrainer` score hidden states by an autograd function of their own: on GPUs the states with a label,
on other devices all of them, with the other scores hidden afterwards. The function writes into slices, which Dynamo
cannot follow: a graph of the whole model would end there, behind a reshape that hides which hidden states are tokens.
So the backbone below the head is compiled instead, and the head takes the backbone's hidden states as tokens.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from deepytorch import autowrap
from deepytorch.patches import replace

_NAME = "_ChunkedLogProbFunction"
_MODULE = "trl.trainer.utils"
_ROWS = (0, 3)  # hidden states and labels; weight, bias and settings are shared by all rows


class OnTokens:
    """The replacement of an autograd function: hidden states known only at tokens give scores of these tokens."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def apply(self, *args: Any) -> Any:
        """Apply the function, to tokens alone if only these are known."""
        if torch.compiler.is_compiling():
            return self.function.apply(*args)
        from deepytorch.compiler.step.outputs.deferred import by_token

        return by_token(self.function.apply, args, _ROWS)


def attach(utils: Any) -> None:
    """Replace the function in TRL's `trainer.utils`; a version with another head is left alone."""
    function = getattr(utils, _NAME, None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        replace(utils, _NAME, OnTokens, "score the tokens alone, where only they are known")
        autowrap.BACKBONES[:] = [each for each in autowrap.BACKBONES if each is not backbone_of] + [backbone_of]


def backbone_of(module: nn.Module) -> nn.Module | None:
    """Return the backbone below TRL's fused head in this module; None if there is no such head, or several."""
    heads = [each for each in module.modules() if _has_fused_head(each)]
    if len(heads) != 1:
        return None
    below = getattr(heads[0], "base_model", None)
    return below if isinstance(below, nn.Module) and below is not heads[0] else None


def _has_fused_head(module: nn.Module) -> bool:
    """Return whether TRL has put a forward of its own on this module.

    That forward has the name of the model's, so its globals are looked at. Under mixed precision Accelerate has put
    another forward in front of it, and keeps TRL's under another name.
    """
    forwards = (vars(module).get(name) for name in ("forward", "_original_forward"))
    methods = (each for each in forwards if isinstance(each, MethodType))
    return any(getattr(each, "__globals__", {}).get("__name__") == _MODULE for each in methods)
