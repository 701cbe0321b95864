from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepytorch.passes.ops import linear_cross_entropy_chunked as chunked
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.passes.ops.linear_cross_entropy_chunked import LossRule
from deepytorch.passes.ops.reference import linear_cross_entropy_reference

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def make(tokens: int = 23, size: int = 12, classes: int = 37, dtype: torch.dtype = torch.float32, bias: bool = True):
    hidden, weight = torch.randn(tokens, size, dtype=dtype), torch.randn(classes, size, dtype=dtype)
    added = torch.randn(classes, dtype=dtype) if bias else None
    target = torch.randint(0, classes, (tokens,))
    return hidden, weight, added, target


def leaves(*given: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if each is None else each.detach().clone().requires_grad_() for each in given]


def both(
    hidden: Any, weight: Any, bias: Any, target: Any, class_weight: Any = None, scale: float = 1.7, **options: Any
):
    """(loss, gradients) of the operator and of what it stands for."""
    found = []
    for ours in (True, False):
        h, w, b = leaves(hidden, weight, bias)
        if ours:
            loss = linear_cross_entropy(h, w, target, bias=b, class_weight=class_weight, **options)
        else:
            rule = {**options, "reduction": REDUCTIONS[options.get("reduction", "mean")]}
            loss = linear_cross_entropy_reference(h, w, b, target, class_weight, LossRule(**rule))
        upstream = torch.linspace(0.5, 1.5, max(loss.numel(), 1), dtype=loss.dtype)[: loss.numel()].view(loss.shape)
        present = [each for each in (h, w, b) if each is not None]
        gradients = torch.autograd.grad(loss * scale, present, upstream)
        found.append((loss.detach(), gradients))
    return found


def agree(found: Any, tolerance: float = 1e-5) -> None:
    (loss, gradients), (wanted, expected) = found
    assert loss.dtype == wanted.dtype
    torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.2},
        {"softcap": 3.0},
        {"softcap": 3.0, "label_smoothing": 0.1},
        {"ignore_index": 5},
        {"z_loss": 0.1},
        {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1},
    ],
    ids=["plain", "smoothed", "capped", "capped and smoothed", "another index is ignored", "z-loss", "all of it"],
)
@pytest.mark.parametrize("ignored", ["none", "some", "all but one"])
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, reduction, bias, options, ignored):
    monkeypatch.setattr(chunked, "_LEAST_ROWS", 4)
    monkeypatch.setattr(chunked, "_CHUNK_BYTES_CPU", 0)  # pieces of four rows, the last one smaller
    hidden, weight, added, target = make(bias=bias)
    index = options.get("ignore_index", -100)
    if ignored == "some":
        target[::3] = index
    elif ignored == "all but one":
        target[:] = index
        target[7] = 6
    agree(both(hidden, weight, added, target, reduction=reduction, **options))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_classes_that_count_differently(reduction, z_loss):
    hidden, weight, bias, target = make()
    target[2:5] = -100
    agree(both(hidden, weight, bias, target, torch.rand(37), reduction=reduction, z_loss=z_loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_z_loss_is_what_it_says(reduction, dtype):
    """Against torch alone: `both` compares with the reference, which has a formula of its own."""
    hidden, weight, bias, target = make(9, dtype=dtype)
    target[2:5] = -100
    h, w, b = leaves(hidden, weight, bias)
    loss = linear_cross_entropy(h, w, target, bias=b, reduction=reduction, z_loss=0.05, upcast=True)
    found = torch.autograd.grad(loss.sum(), (h, w, b))
    exact = leaves(*(each.double() for each in (hidden, weight, bias)))
    logits = F.linear(*exact)
    wanted = F.cross_entropy(logits, target, reduction=reduction)
    squares = 0.05 * logits.logsumexp(-1) ** 2 * (target != -100)
    wanted = wanted + {"none": squares, "mean": squares.sum() / 6, "sum": squares.sum()}[reduction]
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=tolerance)
    for one, other in zip(found, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_no_row_that_counts_gives_what_cross_entropy_gives(reduction, tokens):
    hidden, weight, bias, _ = make(tokens)
    agree(both(hidden, weight, bias, torch.full((tokens,), -100), reduction=reduction))


def test_logits_far_apart_lose_nothing():
    hidden, weight, bias, target = make()
    agree(both(hidden * 200, weight * 10, bias, target), tolerance=1e-4)


@pytest.mark.parametrize("upcast", [False, True], ids=["as it comes", "cast to float before the loss"])
def test_bfloat16_is_no_further_from_float64_than_whole_logits_are(upcast):
    hidden, weight, bias, target = make(256, 64, 500, torch.bfloat16)
    (loss, gradients), (eager_loss, eager) = both(hidden, weight, bias, target, upcast=upcast)
    exact = [None if each is None else each.double() for each in (hidden, weight, bias)]
    _, (wanted, expected) = both(*exact, target)
    assert loss.dtype == (torch.float32 if upcast else torch.bfloat16)
    assert (loss - wanted).abs() <= (eager_loss - wanted).abs() + 2e-2 * (not upcast) + 1e-3
    for one, other, right in zip(gradients, eager, expected, strict=True):
        assert one.dtype == torch.bfloat16
        ours, theirs = (((each.double() - right) ** 2).mean().sqrt() for each in (one, other))
        assert ours <= 1.5 * theirs  # what is made is rounded once more when it is scaled


def test_only_what_is_asked_for_is_made():
    hidden, weight, bias, target = make()
    weight.requires_grad_()
    loss, *made, _ = torch.ops.deepytorch.linear_cross_entropy_sweep.default(
        hidden, weight, bias, target, None, gradients=[False, True, False]
    )
    assert [each.numel() for each in made] == [0, weight.numel(), 0]
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target, bias=bias).requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight, bias), target))


def test_the_graph_may_be_kept():
    hidden, weight, bias, target = make()
    h, w, b = leaves(hidden, weight, bias)
    loss = linear_cross_entropy(h, w, target, bias=b)
    one = torch.autograd.grad(loss, (h, w, b), retain_graph=True)
    two = torch.autograd.grad(loss * 2, (h, w, b))
    for each, other in zip(one, two, strict=True):
        torch.testing.assert_close(2 * each, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "label_smoothing": 0.1, "reduction": "sum"},
        {"reduction": "none"},
        {"softcap": 2.0, "z_loss": 0.1, "reduction": "none"},
    ],
    ids=str,
)
def test_second_derivatives(options):
    hidden, weight, bias, target = make(5, 3, 4, torch.float64)
    target[1] = -100

    def call(h: Any, w: Any, b: Any) -> torch.Tensor:
        return linear_cross_entropy(h, w, target, bias=b, **options)

    given = tuple(leaves(hidden, weight, bias))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_traced_and_compiled(dynamic):
    hidden, weight, bias, target = make()
    torch._dynamo.reset()

    def call(h: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
        return linear_cross_entropy(h * 2, w, t, bias=b) * 3

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (23, 11):
        found = []
        for each in (compiled, call):
            h, w, b = leaves(hidden[:tokens], weight, bias)
            loss = each(h, w, b, target[:tokens])
            found.append((loss.detach(), torch.autograd.grad(loss, (h, w, b))))
        agree(found)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_operators_keep_torchs_rules(transposed, ignored, reduction, dtype):
    hidden, weight, bias, target = make(6, 4, 5, dtype)
    target[2] = -100 if ignored else 1
    given = (*leaves(hidden, weight, bias), target, None)
    if transposed:
        hidden, weight = (each.t().contiguous().requires_grad_() for each in (hidden, weight))
        given = (hidden.t(), weight.t(), *given[2:])
    torch.library.opcheck(
        torch.ops.deepytorch.linear_cross_entropy_sweep.default,
        given,
        {"gradients": [True, True, True], "reduction": reduction},
    )


def test_a_step_with_it_trains_alike():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 37))
    other = copy.deepcopy(model)
    losses = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(9, 6, generator=generator)
            y = torch.randint(0, 37, (9,), generator=generator)
            head, hidden = each[2], each[1](each[0](x))
            if each is model:
                loss = linear_cross_entropy(hidden, head.weight, y, bias=head.bias)
            else:
                loss = F.cross_entropy(head(hidden), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": torch.randn(4)}, r"hidden of shape \(4,\)"),
        ({"weight": torch.randn(5, 3)}, r"weight of shape \(5, 3\)"),
        ({"weight": torch.randn(5, 2).bfloat16()}, "bfloat16"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"target of shape \(3,\)"),
        ({"target": torch.zeros(4)}, "dtype torch.float32"),
        ({"bias": torch.zeros(3)}, r"bias of shape \(3,\)"),
        ({"class_weight": torch.zeros(3)}, "class_weight"),
        ({"class_weight": torch.zeros(5), "label_smoothing": 0.1}, "one of the two"),
        ({"label_smoothing": 1.0}, "label_smoothing 1.0"),
        ({"reduction": "each"}, "reduction 'each'"),
        ({"z_loss": -1e-4}, "z_loss -0.0001"),
        ({"softcap": -1.0}, "softcap -1.0"),
    ],
)
def test_what_does_not_fit_is_named(change, named):
    given = {"hidden": torch.randn(4, 2), "weight": torch.randn(5, 2), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=named):
        linear_cross_entropy(**{**given, **change})
