"""Linear layer and cross-entropy against their reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepytorch.bench.training_step import DTYPES
from deepytorch.gpu_check.nearness import as_near
from deepytorch.gpu_check.outcome import Check
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.passes.ops.linear_cross_entropy_chunked import LossRule
from deepytorch.passes.ops.reference import linear_cross_entropy_reference

KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, smoothed": {"reduction": 2, "label_smoothing": 0.1},
    "softcap": {"softcap": 30.0},
}


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for dtype in DTYPES:
        for name, options in KINDS.items():
            run = partial(loss_is_right, device, dtype, options)
            yield Check("linear + cross-entropy", f"{dtype}, {name}", run, expected_s=2.0)


def loss_is_right(device: torch.device, dtype: str, options: dict[str, Any]) -> str:
    """Compare the loss and both gradients with the reference in float64."""
    generator = torch.Generator().manual_seed(0)
    rows, size, classes = 301, 264, 1003
    given = [torch.randn(rows, size, generator=generator), torch.randn(classes, size, generator=generator) * 0.05]
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = -100
    target = target.to(device)
    rule = LossRule(**options)
    named = {**options, "reduction": {1: "mean", 2: "sum"}[rule.reduction]}

    def of(call: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [each.to(device, kind).requires_grad_() for each in given]
        loss = call(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def reference(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy_reference(hidden, weight, None, target, None, rule)

    exact, eager = of(reference, torch.float64), of(reference, DTYPES[dtype])
    ours = of(lambda hidden, weight: linear_cross_entropy(hidden, weight, target, **named), DTYPES[dtype])
    return as_near(("loss", "gradient of hidden", "gradient of weight"), exact, eager, ours, DTYPES[dtype])
