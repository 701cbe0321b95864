"""The comparison of a form with eager: what is seen, what is no difference, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard

_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = (
    nn.Parameter(torch.randn(3, 4, generator=_GENERATOR)),
    torch.randn(5, 4, generator=_GENERATOR),
    torch.zeros(3),
)


def eager(inputs: Sequence[Any]) -> list[torch.Tensor]:
    weight, batch, seen = inputs
    seen += 1.0  # as a norm's statistics
    return [(batch @ weight.T + seen).square().mean()]


def scaled_gradient(inputs: Sequence[Any]) -> list[torch.Tensor]:
    [loss] = eager(inputs)
    return [loss.detach() + 1.01 * (loss - loss.detach())]


def wrong_stride(inputs: Sequence[Any]) -> list[torch.Tensor]:
    weight, batch, seen = inputs
    return eager([weight, batch.T.reshape(5, 4), seen])


def skipped_statistics(inputs: Sequence[Any]) -> list[torch.Tensor]:
    weight, batch, _ = inputs
    return [(batch @ weight.T).square().mean()]


def unread_statistics(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """As a norm in training that forgets its statistics: the loss of this step is right."""
    weight, batch, seen = inputs
    return [(batch @ weight.T + (seen + 1.0)).square().mean()]


def no_gradient(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [eager(inputs)[0].detach()]


def not_a_number(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [eager(inputs)[0] * float("nan")]


def raises(inputs: Sequence[Any]) -> list[torch.Tensor]:
    raise ValueError("a shape")


def reordered(inputs: Sequence[Any]) -> list[torch.Tensor]:
    weight, batch, seen = inputs
    seen += 1.0
    return [torch.stack([(batch @ row + one).square().mean() for row, one in zip(weight, seen, strict=True)]).mean()]


def guard() -> Guard:
    return Guard(RegionRecord("region", "declined", "inductor"))


@pytest.mark.parametrize(
    "fault",
    [scaled_gradient, wrong_stride, skipped_statistics, unread_statistics, no_gradient, not_a_number, raises],
    ids=lambda f: f.__name__,
)
def test_planted_faults_are_seen(fault: Callable[..., Any]) -> None:
    found = guard().difference(eager, fault, INPUTS)
    assert found
    if fault is raises:
        assert "ValueError: a shape" in found


def test_rounding_is_no_fault_and_nothing_is_changed() -> None:
    calls: list[Any] = []
    weight, _, seen = INPUTS
    handle = weight.register_hook(calls.append)
    before, state, version = weight.detach().clone(), torch.get_rng_state(), weight._version
    try:
        assert guard().difference(eager, reordered, INPUTS) == ""
    finally:
        handle.remove()
    assert not calls  # the script's own hooks
    assert weight.grad is None
    assert torch.equal(weight, before)
    assert weight._version == version
    assert torch.equal(seen, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_both_draw_the_same_numbers() -> None:
    def draws(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [nn.functional.dropout(inputs[1] @ inputs[0].T, 0.5).sum()]

    assert guard().difference(draws, draws, INPUTS) == ""


def test_a_model_that_amplifies_rounding_is_compared_by_what_eager_does_itself() -> None:
    def chaotic(inputs: Sequence[Any], scale: float = 1.0) -> list[torch.Tensor]:
        value = torch.sigmoid(inputs[1] @ inputs[0].T) * scale
        for _ in range(40):  # each doubles a difference, so that those of the last bit come to about 1 on any processor
            value = 3.99 * value * (1.0 - value)
        return [value]

    assert guard().difference(chaotic, lambda inputs: chaotic(inputs, 1.0 + 2e-7), INPUTS) == ""


def test_code_that_draws_other_numbers_is_not_compared_where_eager_draws_some() -> None:
    class Other:
        draws_alike = False

        def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
            return [nn.functional.dropout(inputs[1] @ inputs[0].T, 0.9).sum()]

    def draws(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [nn.functional.dropout(inputs[1] @ inputs[0].T, 0.5).sum()]

    assert guard().difference(draws, Other(), INPUTS) == ""
    assert guard().difference(eager, Other(), INPUTS)


def test_memory_that_is_not_there_is_a_difference() -> None:
    def too_large(inputs: Sequence[Any]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("asked for 80 GiB")

    assert "asked for 80 GiB" in str(guard().difference(eager, too_large, INPUTS))


def test_code_for_a_models_own_weights_gets_them_unless_they_have_hooks() -> None:
    def is_own(inputs: Sequence[Any]) -> list[torch.Tensor]:
        assert inputs[0] is INPUTS[0]
        return reordered(inputs)

    record = RegionRecord("region", "declined", "inductor")
    assert Guard(record, own_weights=True).difference(eager, is_own, INPUTS) == ""
    assert INPUTS[0].grad is None
    handle = INPUTS[0].register_hook(lambda gradient: None)
    try:
        assert Guard(record, own_weights=True).difference(eager, scaled_gradient, INPUTS) is None
    finally:
        handle.remove()
    assert Guard(record, own_weights=True).difference(eager, scaled_gradient, INPUTS)


def test_a_region_that_writes_to_a_weight_is_not_compared() -> None:
    weight = nn.Parameter(torch.ones(3))

    def decays(inputs: Sequence[Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            inputs[0].mul_(0.9)
        return [inputs[0].sum()]

    assert (
        Guard(RegionRecord("region", "declined", "inductor"), written={0}).difference(decays, decays, [weight]) is None
    )
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("own_weights", [False, True])
def test_what_is_no_weight_is_copied_and_no_gradient_goes_on_from_there(own_weights: bool) -> None:
    source = nn.Parameter(torch.ones(3))
    given = [(2.0 * source).sin(), nn.Parameter(torch.ones(3))]

    def halves(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [(inputs[0].mul_(0.5) * inputs[1]).sum()]

    record = RegionRecord("region", "declined", "inductor")
    assert Guard(record, own_weights=own_weights, written={0}).difference(halves, halves, given) == ""
    assert torch.equal(given[0], torch.full((3,), 2.0).sin())
    given[0].sum().backward()  # the graph behind it has not been gone through
    assert torch.equal(source.grad, 2.0 * torch.full((3,), 2.0).cos())


def test_infinities_and_nan_of_eager_are_no_difference_if_both_have_them() -> None:
    def masks(inputs: Sequence[Any], allowed: float = 1.0) -> list[torch.Tensor]:
        scores = allowed * (inputs[1] @ inputs[0].T)
        return [torch.cat([scores, torch.full_like(scores, -torch.inf), scores.detach() / 0.0 * 0.0])]

    assert guard().difference(masks, masks, INPUTS) == ""
    assert guard().difference(masks, lambda inputs: masks(inputs, 1.01), INPUTS)
    finite = lambda inputs: [masks(inputs)[0].nan_to_num(0.0)]  # noqa: E731
    assert "by nan" in str(guard().difference(masks, finite, INPUTS))


def test_a_loss_that_is_no_number_tells_nothing() -> None:
    def ignored(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [(inputs[0].sum() * 0.0) / 0.0]

    def raises(inputs: Sequence[Any]) -> list[torch.Tensor]:
        raise ValueError("what eager says to such a batch")

    assert guard().difference(ignored, ignored, INPUTS) is None
    assert guard().difference(raises, eager, INPUTS) is None


@pytest.mark.parametrize("view", [torch.ones(4, 6)[:, :-1], torch.ones(6, 4).T[1:, ::2], torch.ones(1, 5).expand(4, 5)])
def test_inputs_keep_their_strides(view: torch.Tensor) -> None:
    def looks(inputs: Sequence[Any]) -> list[torch.Tensor]:
        assert inputs[1].stride() == view.stride()
        return [inputs[0].sum() * inputs[1].sum()]

    assert guard().difference(looks, looks, [nn.Parameter(torch.ones(2)), view]) == ""


def test_it_is_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.compiler.step.guard.has_room", lambda devices: False)
    assert guard().difference(eager, scaled_gradient, INPUTS) is None
