"""Every optimizer that is made after the import tells `autowrap` which parameters are trained.

This module imports nothing of torch by itself: it is called while torch is being imported.
"""

from __future__ import annotations

from typing import Any

from deepytorch.patches import replace
from deepytorch.torch_internals import is_usable


def attach(torch_module: Any) -> None:
    """Listen to `torch.optim.Optimizer`. `torch_module`: torch, as it has just been imported."""

    def listening(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not is_usable():
                return
            from deepytorch.autowrap import watch

            watch(self)

        return __init__

    replace(torch_module.optim.Optimizer, "__init__", listening, "learn which parameters are trained")
