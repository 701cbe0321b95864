"""The judge of a model's numbers: equal to eager's, or further from them than rounding explains.

A number may differ by a bound for fp32, or by ten times what eager's own changes by when every weight is moved by its
last bit: some models amplify rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from deepytorch.bench.model_classes.training import LEARNING_RATE

BOUNDS = {"loss": 1e-5, "output": 2e-5, "gradient": 1e-4, "weight": 1e-4}  # relative
SENSITIVITIES = 10.0
# A gradient with less than a thousandth of the whole is judged as if it had that much: it is mostly rounding. So is a
# weight that has been made of such gradients alone.
_SMALLEST_PART = 1e-3


@dataclass(frozen=True, slots=True)
class Worst:
    """The number that comes nearest to what is allowed, or goes furthest beyond it.

    difference: relative, to eager's. own: eager's own sensitivity, on the same scale, the largest of all numbers.
    """

    what: str
    difference: float
    own: float
    allowed: float

    @property
    def is_equal(self) -> bool:
        """Return whether all numbers are equal."""
        return self.difference <= self.allowed


def judge(
    eager: Sequence[Mapping[str, torch.Tensor]],
    moved: Sequence[Mapping[str, torch.Tensor]],
    ours: Sequence[Mapping[str, torch.Tensor]],
) -> Worst:
    """Return the worst number of all steps. moved: eager's, with weights moved by their last bit."""
    worst = Worst("loss", 0.0, 0.0, BOUNDS["loss"])
    own: dict[str, float] = {}
    for step, (expected, shifted, found) in enumerate(zip(eager, moved, ours, strict=True), 1):
        least = _SMALLEST_PART * _whole_gradient(expected)
        for name in expected.keys() | found.keys():
            kind = name.split()[0]
            scale = {"gradient": least, "weight": least * LEARNING_RATE}.get(kind, 0.0)
            own[name] = max(own.get(name, 0.0), _finite(_apart(expected.get(name), shifted.get(name), scale)))
            difference = _apart(expected.get(name), found.get(name), scale)
            allowed = max(BOUNDS[kind], SENSITIVITIES * own[name])
            if difference / allowed > worst.difference / worst.allowed:
                worst = Worst(f"{name}, step {step}", difference, 0.0, allowed)
    return replace(worst, own=max(own.values(), default=0.0))


def _whole_gradient(numbers: Mapping[str, torch.Tensor]) -> float:
    squares = [float(each.double().square().sum()) for name, each in numbers.items() if name.startswith("gradient")]
    return _finite(math.sqrt(sum(squares))) if squares else 0.0


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, least: float) -> float:
    """Return the norm of the difference over that of `one`; infinite where one is missing or not finite alone."""
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    first, second = one.double(), other.double()
    same = (first == second) | (first.isnan() & second.isnan())
    difference = float((first - second).masked_fill(same, 0.0).norm())
    if difference == 0.0:
        return 0.0
    scale = max(float(first.masked_fill(~first.isfinite(), 0.0).norm()), least)
    return difference / scale if math.isfinite(difference) and scale else math.inf


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
