"""The checks of `deepytorch gpu-check`: what is cheap and decides most comes first, figures last."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepytorch.gpu_check.checks import (
    attention,
    background_compile,
    graphs,
    loss,
    machine_code,
    models,
    packing,
    ranks,
)
from deepytorch.gpu_check.figures import SUBJECTS
from deepytorch.gpu_check.outcome import Check


def checks_on(device: str) -> list[Check]:
    """Return every check on `device`, those of a group behind each other. No device of that kind need be there."""
    of = torch.device(device)
    modules = (machine_code, loss, attention, packing, models, ranks, graphs, background_compile, *SUBJECTS)
    return [replace(check, module=module.__name__) for module in modules for check in module.checks(of)]
