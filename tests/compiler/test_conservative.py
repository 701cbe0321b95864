"""Models that look across positions, at pads too: packing declines or keeps that part padded, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.parity import (
    Batch,
    Pair,
    batches,
    declined,
    describe,
    masked_lm_batch,
)
from tests.compiler.plain_models import (
    DIM,
    VOCAB,
    Block,
    Plain,
    attended,
    distance,
    keys,
    scaled,
    sdpa_bool,
)  # fmt: skip

GIVEN = ((4, 11, "right"), (3, 13, "left"), (5, 9, "holes"))

pytestmark = pytest.mark.slow


def train(model: nn.Module, given: list[Batch] | None = None) -> str:
    """Train, compare, and tell what happened."""
    report = Pair(model.train()).train(given or batches(masked_lm_batch, *GIVEN))
    assert not [each for region in report.regions for each in region.fallbacks], describe(report)
    return describe(report)


def pooled(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(reduce(x)), labels[:, 1].clamp(min=0))

    return loss


# Each kind of reduction; the rules of all others are in tests/passes/test_rules.py.
POOLS = {
    "mean": lambda x: x.mean(1),
    "maximum": lambda x: x.amax(1),
    "average pooling": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1),
    "mean by einsum": lambda x: torch.einsum("bsh->bh", x) / x.shape[1],
    "product with ones": lambda x: (x.transpose(1, 2) @ torch.ones(x.shape[1], 1)).squeeze(-1),
    "attention over itself": lambda x: (x.softmax(1) * x).sum(1),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_without_the_mask_sees_pads_so_they_stay(name: str) -> None:
    model = Plain(sdpa_bool, pooled(POOLS[name]), layers=1)
    report = Pair(model.train()).train(batches(masked_lm_batch, *GIVEN))
    assert not [change for region in report.regions for change in region.changes if "attention" in change]
    assert declined(report), describe(report)


class Across(nn.Module):
    """Something across positions between two attentions."""

    def __init__(self, across: nn.Module | Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first, self.second = Block(sdpa_bool), Block(sdpa_bool)
        self.across = across

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(input_ids), attention_mask)
        x = self.second(self.across(x), attention_mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.view(-1))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x.transpose(1, 2).contiguous()).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


ACROSS: dict[str, Callable[[], Any]] = {
    "batch norm": BatchNorm,
    "convolution": Convolution,
    "mean of a column": lambda: lambda x: x - x.mean(0, keepdim=True),
    "flip of rows": lambda: lambda x: x + x.flip(0),
    "fourier transform": lambda: lambda x: x + torch.fft.fft(x, dim=1).real * 0.1,
    "first position added to all": lambda: lambda x: x + x[:, :1],
    "difference to the neighbour": lambda: lambda x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "product of positions": lambda: lambda x: x + 0.01 * (x @ x.transpose(1, 2)) @ x,
    "positions folded into channels": lambda: lambda x: x + x.reshape(x.shape[0], DIM, -1).mean(-1)[:, None],
    "gather": lambda: lambda x: x + x.gather(1, torch.zeros_like(x, dtype=torch.long) + x.shape[1] - 1),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_positions_stays_padded(name: str) -> None:
    train(Across(ACROSS[name]()))


# An operator that nobody has a rule for. It works token by token, but who is to know.
@torch.library.custom_op("deepytorch_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, gradient: gradient * 2)


def test_an_unknown_operator_keeps_what_feeds_it_padded_and_is_named() -> None:
    report = Pair(Across(lambda x: double(x)).train()).train(batches(masked_lm_batch, *GIVEN))
    assert "double" in declined(report), describe(report)


# ------------------------------------------------------------------------------------------ masks with other meanings


def normalised_twice(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = scaled(q, k).masked_fill(~keys(mask), -1e9).softmax(-1)
    return weights @ v + weights.mean(-1, keepdim=True)


# Others are in tests/passes/test_masks.py.
MEANINGS: dict[str, Callable[..., torch.Tensor]] = {
    "not itself": lambda q, k, v, m: attended(q, k, v, keys(m) & (distance(q) != 0)),
    "pads only": lambda q, k, v, m: attended(q, k, v, ~keys(m)),
    "off by one": lambda q, k, v, m: attended(q, k, v, keys(m.roll(1, 1))),
    "the next row's mask": lambda q, k, v, m: attended(q, k, v, keys(m.roll(1, 0))),
    "softmax over queries": lambda q, k, v, m: scaled(q, k).masked_fill(~keys(m), -1e9).softmax(-2) @ v,
    "normalised twice": normalised_twice,
    "masked after softmax": lambda q, k, v, m: (scaled(q, k).softmax(-1) * keys(m)) @ v,
}


@pytest.mark.parametrize("attend", MEANINGS.values(), ids=MEANINGS)
def test_a_mask_with_another_meaning_is_not_taken_for_a_known_one(attend: Any) -> None:
    train(Plain(attend, layers=1))


class WindowInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("near", torch.ones(64, 64, dtype=torch.bool).tril(12).triu(-12))

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return attended(q, k, v, keys(mask) & self.near[: q.shape[2], : q.shape[2]])


WINDOWS = {
    "fractions": lambda q, k, v, m: attended(q, k, v, keys(m) & (distance(q).abs() * 0.1 < 2.0)),
    "a buffer": WindowInABuffer(),
}


@pytest.mark.parametrize("attend", WINDOWS.values(), ids=WINDOWS)
def test_a_window_wider_than_the_first_batches_is_not_taken_for_no_window(attend: Any) -> None:
    train(Plain(attend, layers=1), batches(masked_lm_batch, (4, 9, "right"), (3, 48, "right"), (4, 40, "left")))


class OfRows(nn.Module):
    """Attends over positions, then over the rows of the batch, which have no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first = Block(sdpa_bool)
        self.second = Block(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(input_ids), attention_mask)
        x = self.second(x.transpose(0, 1), attention_mask).transpose(0, 1)
        return F.cross_entropy(self.head(x).reshape(-1, VOCAB), labels.view(-1))


def test_attention_over_rows_is_not_taken_for_one_over_positions() -> None:
    train(OfRows())


def test_one_attention_without_a_mask_among_masked_ones_sees_pads() -> None:
    model = Across(nn.Identity())
    model.second = Block(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v))
    train(model)


# ------------------------------------------------------------------------------------------ losses and sizes


def words(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.head(x).view(-1, VOCAB)


def contrast_of_second_positions(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    pooled = F.normalize(x[:, 1], dim=-1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(x.shape[0], device=x.device))


COUNT_PADS: dict[str, Callable[..., torch.Tensor]] = {
    "mean over all, ignored as zeros": lambda model, x, mask, labels: F.cross_entropy(
        words(model, x), labels.view(-1), reduction="none"
    ).mean(),
    "mean of logits too": lambda model, x, mask, labels: (
        F.cross_entropy(words(model, x), labels.view(-1)) + words(model, x).square().mean()
    ),
    "masked, but averaged over all": lambda model, x, mask, labels: ((model.head(x) ** 2).mean(-1) * mask).mean(),
    "divided by the number of positions": lambda model, x, mask, labels: (
        F.cross_entropy(words(model, x), labels.view(-1), reduction="sum") / mask.numel()
    ),
    "scaled by length": lambda model, x, mask, labels: F.cross_entropy(
        words(model, x * mask.sum(1)[:, None, None] / x.shape[1]), labels.view(-1)
    ),
    "squared error of all": lambda model, x, mask, labels: F.mse_loss(
        model.head(x), torch.zeros(VOCAB).expand(*mask.shape, VOCAB)
    ),
    "contrast of second positions": contrast_of_second_positions,
}


@pytest.mark.parametrize("loss", COUNT_PADS.values(), ids=COUNT_PADS)
def test_losses_that_count_pads_keep_counting_them(loss: Callable[..., Any]) -> None:
    train(Plain(sdpa_bool, loss, layers=1), batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (4, 8, "one")))


def test_an_embedding_that_counts_its_ids_counts_pads_too() -> None:
    model = Plain(sdpa_bool, layers=1)
    model.tokens = nn.Embedding(VOCAB, DIM, scale_grad_by_freq=True)
    train(model)


def test_an_embedding_with_a_padding_id_leaves_its_gradient_zero() -> None:
    model = Plain(sdpa_bool, layers=1)
    model.tokens = nn.Embedding(VOCAB, DIM, padding_idx=7)
    train(model)


def test_a_model_without_attention_is_compiled_as_it_is() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
            x = self.tokens(input_ids) * attention_mask[..., None]
            return F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))

    assert "no attention" in train(Words())


def test_an_image_transformer_has_no_padding_to_strip() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.block = (
                nn.Conv2d(3, DIM, 4, 4),
                Block(lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v)),
            )
            self.head = nn.Linear(DIM, 3)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.block(self.cut(images).flatten(2).transpose(1, 2), labels)
            return F.cross_entropy(self.head(x.mean(1)), labels)

    given = [{"images": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 3, (rows,))} for rows in (4, 3, 5)]
    report = Pair(Patches().train()).train(given)
    assert report.total("steps_packed") == 0, describe(report)
