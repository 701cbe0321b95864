"""TRL's fused head works token by token, which nobody could see from outside: it runs on tokens alone.

`SFTTrainer` and `DPOTrainer` score hidden states by an autograd function of their own, on GPUs those with a label, on
other devices all of them, and hide the others' scores after that. It writes into slices, which Dynamo cannot follow: a
graph of the whole model would end there, behind a reshape that hides which hidden states are tokens. The backbone below
it is compiled instead, whose hidden states the head takes as tokens.
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
_ROWS = (0, 3)  # hidden states and labels; weight, bias and settings are everybody's


class OnTokens:
    """Stands in for an autograd function: hidden states of which only the tokens are known give scores of these."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def apply(self, *args: Any) -> Any:
        """As the function's own."""
        if torch.compiler.is_compiling():
            return self.function.apply(*args)
        from deepytorch.compiler.step.outputs.deferred import by_token

        return by_token(self.function.apply, args, _ROWS)


def attach(utils: Any) -> None:
    """Replace the name in TRL's `trainer.utils`; a version that has another head is left alone."""
    function = getattr(utils, _NAME, None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        replace(utils, _NAME, OnTokens, "score the tokens alone, where only they are known")
        autowrap.BACKBONES[:] = [each for each in autowrap.BACKBONES if each is not backbone_of] + [backbone_of]


def backbone_of(module: nn.Module) -> nn.Module | None:
    """What lies below TRL's fused head in this module; None where there is no such head, or several."""
    heads = [each for each in module.modules() if _has_fused_head(each)]
    if len(heads) != 1:
        return None
    below = getattr(heads[0], "base_model", None)
    return below if isinstance(below, nn.Module) and below is not heads[0] else None


def _has_fused_head(module: nn.Module) -> bool:
    """Whether TRL has put a forward of its own on this module. It wears the name of the model's; its globals tell.

    Under mixed precision Accelerate has put another one in front of it, and keeps it under a name of its own.
    """
    forwards = (vars(module).get(name) for name in ("forward", "_original_forward"))
    methods = (each for each in forwards if isinstance(each, MethodType))
    return any(getattr(each, "__globals__", {}).get("__name__") == _MODULE for each in methods)
