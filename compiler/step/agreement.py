"""The agreement of two runs of one computation, padded and packed: their outputs, and gradients of all outputs.

Both runs are right if they differ by rounding alone, which differs because sums are in another order. Verification and
the guard compare a step of training so, and model entry a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_NO_OUTPUT = 1e-7  # outputs are compared as if their root mean square were at least this
_TIMES_OWN = 10.0  # a step's difference that is allowed, in terms of what eager differs from itself
_NO_GRADIENT = 1e-6  # this share of the largest gradient's norm is allowed on top: true zeros come out as rounding


@dataclass(frozen=True)
class Tolerance:
    """The allowed relative differences (by Euclidean norm) of one comparison.

    Attributes:
        outputs: Of outputs with one entry or more for each token.
        losses: Of outputs that are one number, the mean over many tokens.
        gradients: Of gradients with respect to weights, which are sums over tokens.
    """

    outputs: float
    losses: float
    gradients: float


Tolerances = Mapping[str, Tolerance]  # by precision, see `precision_of`

# Of steps on real batches of thousands of tokens, whose rounding adds up further than that of a probe.
OF_STEPS: Tolerances = {
    "fp32": Tolerance(1e-4, 1e-4, 1e-3),
    "tf32": Tolerance(2e-3, 2e-3, 3e-2),
    "half": Tolerance(3e-2, 3e-2, 0.15),
}


@dataclass(frozen=True)
class Difference:
    """One difference: what differs, the relative difference, and the allowed one."""

    what: str
    found: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        """Return whether it is within the tolerance; NaN is not."""
        return self.found <= self.allowed


def precision_of(tensors: Iterable[Tensor]) -> str:
    """Return the coarsest precision in which `tensors` were computed: "half", "tf32" or "fp32"."""
    found = "fp32"
    for each in tensors:
        if each.dtype in HALF or torch.is_autocast_enabled(each.device.type):
            return "half"
        if each.is_cuda and torch.get_float32_matmul_precision() != "highest":
            found = "tf32"
    return found


def difference_of_steps(
    eager: Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]],
    form: Callable[[], Sequence[Tensor]],
    weights: Sequence[Tensor],
) -> Difference:
    """Return the largest difference of a training step from eager's, and what is allowed.

    If it is more than rounding usually makes, eager is run twice more, once with its weights moved in their last bit: a
    model that amplifies that by as much cannot be told apart more closely.

    Args:
        eager: Returns the outputs of eager, with its weights changed by a function.
        form: Returns the same outputs, computed otherwise.
        weights: The tensors whose gradients are compared; none leaves these out.
    """
    expected, found = eager(_unchanged), form()
    if len(expected) != len(found):
        return Difference(f"{len(found)} outputs in place of {len(expected)}, that is", float("inf"), 0.0)
    tolerance = OF_STEPS[precision_of([*expected, *weights])]
    worst = largest_difference(expected, found, weights, tolerance)
    if worst.is_allowed:
        return worst
    own = largest_difference(eager(_unchanged), eager(_moved), weights, tolerance)
    return replace(worst, allowed=max(worst.allowed, _TIMES_OWN * own.found / own.allowed * worst.allowed))


def _unchanged(weight: Tensor) -> Tensor:
    return weight


def _moved(weight: Tensor) -> Tensor:
    """Return a weight that is moved in its last bit."""
    return weight * (1.0 + torch.finfo(weight.dtype).eps)


def largest_difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], weights: Sequence[Tensor], tolerance: Tolerance
) -> Difference:
    """Return the difference that is largest in terms of what is allowed.

    Args:
        expected: Outputs of the padded run, floating tensors of any shape.
        found: Outputs of the packed run, of the same shapes and dtypes.
        weights: The tensors whose gradients are compared; those of a weighted sum of all outputs.
        tolerance: The differences that are allowed.
    """
    differences = [
        _of_outputs(number, one, other, tolerance)
        for number, (one, other) in enumerate(zip(expected, found, strict=True))
    ]
    differences += _of_gradients(expected, found, weights, tolerance)
    # NaN first: it compares as smaller than nothing.
    return max(
        differences,
        key=lambda each: each.found / each.allowed if each.found == each.found else float("inf"),
        default=Difference("nothing", 0.0, 1.0),
    )


def _of_outputs(number: int, expected: Tensor, found: Tensor, tolerance: Tolerance) -> Difference:
    one, other = expected.detach().double(), found.detach().double()
    scale = max(float(one.norm()), _NO_OUTPUT * max(one.numel(), 1) ** 0.5)
    allowed = tolerance.outputs if expected.dim() else tolerance.losses
    return Difference(f"output {number}", float((other - one).norm()) / scale, allowed)


def _of_gradients(
    expected: Sequence[Tensor], found: Sequence[Tensor], weights: Sequence[Tensor], tolerance: Tolerance
) -> list[Difference]:
    if not weights:
        return []
    try:
        ones, others = _gradients(expected, weights), _gradients(found, weights)
    except RuntimeError as error:
        if "heckpoint" in str(error) and ".grad()" in str(error):  # torch's reentrant one, DeepSpeed's: backward() only
            return []
        raise
    largest = max((float(each.norm()) for each in ones if each is not None), default=0.0)
    differences = []
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        what = f"the gradient of weight {number}, of shape {tuple(weights[number].shape)},"
        if one is None or other is None:
            is_alone = any(each is not None and bool(each.any()) for each in (one, other))
            differences.append(Difference(what, float("inf") if is_alone else 0.0, tolerance.gradients))
            continue
        difference, norm = float((one.double() - other.double()).norm()), float(one.double().norm())
        scale = norm + _NO_GRADIENT * largest / tolerance.gradients
        differences.append(Difference(what, difference / max(scale, 1e-30), tolerance.gradients))
    return differences


def _gradients(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a weighted sum of all outputs' entries, with a different factor for each entry."""
    total: Any = None
    for number, output in enumerate(each for each in outputs if each.requires_grad):
        generator = torch.Generator().manual_seed(number)
        factors = torch.randn(output.shape, generator=generator) if output.dim() else torch.ones(())
        part = (output.float() * factors.to(output.device)).sum() / max(output.numel(), 1) ** 0.5
        total = part if total is None else total + part
    if total is None:
        return [None] * len(weights)
    return torch.autograd.grad(total, list(weights), allow_unused=True)
