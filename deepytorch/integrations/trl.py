"""TRL's fused head works token by token, which nobody could see from outside: it runs on tokens alone.

`SFTTrainer` and `DPOTrainer` score hidden states by an autograd function of their own, on GPUs those with a label, on
other devices all of them, and hide the others' scores after that.
"""

from __future__ import annotations

from typing import Any

import torch

from deepytorch.patches import replace

_NAME = "_ChunkedLogProbFunction"
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
        from deepytorch.compiler.outputs.deferred import by_token

        return by_token(self.function.apply, args, _ROWS)


def attach(utils: Any) -> None:
    """Replace the name in `trl.trainer.utils`; a version that has another head is left alone."""
    function = getattr(utils, _NAME, None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        replace(utils, _NAME, OnTokens, "score the tokens alone, where only they are known")
