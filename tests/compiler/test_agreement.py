"""Two runs of one computation: rounding is let through, all else is not."""

from __future__ import annotations

import pytest
import torch

from deepytorch.compiler.step.agreement import Tolerance, largest_difference, precision_of

TOLERANCE = Tolerance(outputs=1e-5, losses=1e-6, gradients=1e-4)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 12).reshape(3, 4).requires_grad_()


def test_rounding_agrees(weight: torch.Tensor) -> None:
    worst = largest_difference([weight * 3.0], [weight * (3.0 + 1e-6)], [weight], TOLERANCE)
    assert worst.is_allowed
    assert 0.0 < worst.found < 1e-6


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda weight: weight * 3.001, "output 0"),
        (lambda weight: weight * float("nan"), "output 0"),
        (lambda weight: weight.detach() * 3.0 + weight * 0.0, "the gradient of weight 0, of shape (3, 4),"),
        (lambda weight: (weight * 3.0).detach(), "the gradient of weight 0, of shape (3, 4),"),
    ],
    ids=["another value", "not a number", "another gradient", "no gradient"],
)
def test_what_differs_is_named(weight: torch.Tensor, other, what: str) -> None:  # type: ignore[no-untyped-def]
    worst = largest_difference([weight * 3.0], [other(weight)], [weight], TOLERANCE)
    assert (worst.what, worst.is_allowed) == (what, False)


def test_a_loss_has_a_tolerance_of_its_own(weight: torch.Tensor) -> None:
    loss = weight.square().mean()
    assert not largest_difference([loss], [loss * (1 + 5e-6)], [], TOLERANCE).is_allowed
    assert largest_difference([loss[None]], [loss[None] * (1 + 5e-6)], [], TOLERANCE).is_allowed


def test_a_true_zero_may_come_out_as_rounding_of_the_largest_gradient(weight: torch.Tensor) -> None:
    bias = torch.zeros(3, requires_grad=True)

    def agree(factor: float) -> bool:
        expected, found = weight * 3.0 + 0.0 * bias[:, None], weight * 3.0 + factor * bias[:, None]
        return largest_difference([expected], [found], [weight, bias], TOLERANCE).is_allowed

    assert agree(1e-8)
    assert not agree(1e-3)


def test_an_error_of_a_backward_is_no_agreement(weight: torch.Tensor) -> None:
    expected = weight * weight
    torch.autograd.grad(expected.sum(), [weight])
    with pytest.raises(RuntimeError, match="a second time"):
        largest_difference([expected], [expected], [weight], TOLERANCE)


def test_the_coarsest_precision_counts(weight: torch.Tensor) -> None:
    assert precision_of([weight]) == "fp32"
    assert precision_of([weight, weight.bfloat16()]) == "half"
    with torch.autocast("cpu", torch.bfloat16):
        assert precision_of([weight]) == "half"
