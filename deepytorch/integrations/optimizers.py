"""Every optimizer that is made after the import tells `autowrap` which parameters are trained.

Imports nothing of torch's by itself: it is called while torch is being imported.
"""

from __future__ import annotations

import functools
from typing import Any


def attach(torch_module: Any) -> None:
    """Listen to `torch.optim.Optimizer`. `torch_module`: torch, as it has just been imported."""
    base = torch_module.optim.Optimizer
    original = base.__init__
    if hasattr(original, "_deepytorch_original"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepytorch.autowrap import watch

        original(self, *args, **kwargs)
        watch(self)

    __init__._deepytorch_original = original  # type: ignore[attr-defined]
    base.__init__ = __init__


def detach(torch_module: Any) -> None:
    """Give torch its own `Optimizer.__init__` back."""
    base = torch_module.optim.Optimizer
    base.__init__ = getattr(base.__init__, "_deepytorch_original", base.__init__)
