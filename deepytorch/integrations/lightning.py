"""Lightning: the model inside of a LightningModule is armed, and not the LightningModule.

With several ranks Lightning sends `training_step` through the forward of the module that wraps its own. For that call
the LightningModule is a training loop, which logs and looks around, and not a model.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def attach(_: Any) -> None:
    """Have `autowrap` ignore calls of a training step. `_`: Lightning's strategies.strategy, in either package."""
    from deepytorch import autowrap

    if runs_a_step not in autowrap.LOOPS:
        autowrap.LOOPS.append(runs_a_step)


def runs_a_step(module: nn.Module) -> bool:
    """Return whether a module's present call is Lightning's way to call a step of its loop."""
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    forward = vars(inner).get("forward")
    return getattr(forward, "__qualname__", "").startswith("_ForwardRedirection.")
