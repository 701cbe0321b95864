"""The agreement of two runs of one computation, padded and packed: their outputs, and gradients of all outputs.

Both runs are right if they differ by rounding alone, which differs because sums are in another order. Verification and
the guard compare a step of training so, and model entry a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_PIECE = 1 << 22  # entries that are compared at a time
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


class NoVerdict(Exception):
    """An error, with the reason, for steps that cannot be compared, whatever the other one gives."""


def difference_of_steps(
    eager: Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]],
    form: Callable[[], Sequence[Tensor]],
    weights: Sequence[Tensor],
) -> Difference:
    """Return the largest difference of a training step from eager's, and what is allowed.

    If it is more than rounding usually makes, eager is run once more, with its weights moved in their last bit: a
    model that amplifies that by as much cannot be told apart more closely. Raises `NoVerdict` if eager itself fails, or
    gives a loss that is not finite.

    Args:
        eager: Returns the outputs of eager, with its weights changed by a function.
        form: Returns the same outputs, computed otherwise.
        weights: The tensors whose gradients are compared; none leaves these out.
    """
    # Each step has its backward before the next one begins, so that memory holds the activations of one.
    try:
        expected = _Numbers.of(eager(_unchanged), weights)
    except Exception as error:
        raise NoVerdict(f"eager fails with {type(error).__name__}: {error}") from error
    losses = [each.item() for each in expected.outputs if not each.dim() and not each.isfinite()]
    if losses:
        raise NoVerdict(f"a loss of eager's is {losses[0]}")
    found = _Numbers.of(form(), weights)
    if len(expected.outputs) != len(found.outputs):
        what = f"{len(found.outputs)} outputs in place of {len(expected.outputs)}, that is"
        return Difference(what, float("inf"), 0.0)
    tolerance = OF_STEPS[precision_of([*expected.outputs, *weights])]
    worst = expected.largest_difference(found, tolerance)
    if worst.is_allowed:
        return worst
    del found
    own = expected.largest_difference(_Numbers.of(eager(_moved), weights), tolerance)
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
    return _Numbers.of(expected, weights).largest_difference(_Numbers.of(found, weights), tolerance)


class _Numbers(NamedTuple):
    """The numbers of one run: its outputs, without their graph, and the gradients of weights; none if not known."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]

    @classmethod
    def of(cls, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> _Numbers:
        """Return the numbers of a run that has given these outputs."""
        try:
            gradients = _gradients(outputs, weights) if weights else ()
        except RuntimeError as error:
            if not ("heckpoint" in str(error) and ".grad()" in str(error)):
                raise
            gradients = ()  # a reentrant checkpoint of torch's, or DeepSpeed's: backward() only
        return cls([each.detach() for each in outputs], gradients)

    def largest_difference(self, found: _Numbers, tolerance: Tolerance) -> Difference:
        """Return the difference of other numbers from these that is largest in terms of what is allowed."""
        differences = [
            _of_outputs(number, one, other, tolerance)
            for number, (one, other) in enumerate(zip(self.outputs, found.outputs, strict=True))
        ]
        if self.gradients and found.gradients:
            differences += _of_gradients(self.gradients, found.gradients, tolerance)
        # NaN first: it compares as smaller than nothing.
        return max(
            differences,
            key=lambda each: each.found / each.allowed if each.found == each.found else float("inf"),
            default=Difference("nothing", 0.0, 1.0),
        )


def _of_outputs(number: int, expected: Tensor, found: Tensor, tolerance: Tolerance) -> Difference:
    if expected.shape != found.shape:
        return Difference(f"output {number}, of shape {tuple(found.shape)},", float("inf"), tolerance.outputs)
    norm, difference = _norms(expected, found)
    scale = max(norm, _NO_OUTPUT * max(expected.numel(), 1) ** 0.5)
    allowed = tolerance.outputs if expected.dim() else tolerance.losses
    return Difference(f"output {number}", difference / scale, allowed)


def _norms(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the norms of what is expected and of the difference, where the two are not equal, as infinities may be.

    In pieces, since large logits would take as much memory again several times over.
    """
    norm = difference = 0.0
    dense = (each.detach() if each.layout is torch.strided else each.detach().to_dense() for each in (expected, found))
    pieces = (each.reshape(-1).split(_PIECE) for each in dense)
    for one, other in zip(*pieces, strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        one, other = one.double().masked_fill(same & ~one.isfinite(), 0.0), other.double()
        norm += float(one.square().sum())
        difference += float((other - one).masked_fill(same, 0.0).square().sum())
    return norm**0.5, difference**0.5


def _of_gradients(
    ones: Sequence[Tensor | None], others: Sequence[Tensor | None], tolerance: Tolerance
) -> list[Difference]:
    largest = max((float(each.norm()) for each in ones if each is not None), default=0.0)
    differences = []
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        shape = next((tuple(each.shape) for each in (one, other) if each is not None), ())
        what = f"the gradient of weight {number}, of shape {shape},"
        if one is None or other is None:
            is_alone = any(each is not None and bool(each.any()) for each in (one, other))
            differences.append(Difference(what, float("inf") if is_alone else 0.0, tolerance.gradients))
            continue
        norm, difference = _norms(one, other)
        scale = norm + _NO_GRADIENT * largest / tolerance.gradients
        differences.append(Difference(what, difference / max(scale, 1e-30), tolerance.gradients))
    return differences


def _gradients(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a weighted sum of all outputs' entries, with a factor for each row and each column."""
    total: Any = None
    for number, output in enumerate(each for each in outputs if each.requires_grad and each.numel()):
        generator = torch.Generator().manual_seed(number)
        with torch.autocast(output.device.type, enabled=False):
            part = output.float()
            if output.dim():
                rows = part.reshape(-1, output.shape[-1])
                by_row, by_column = (torch.randn(size, generator=generator).to(output.device) for size in rows.shape)
                part = by_row @ (rows @ by_column) / output.numel() ** 0.5
        total = part if total is None else total + part
    if total is None:
        return [None] * len(weights)
    return torch.autograd.grad(total, list(weights), allow_unused=True)
