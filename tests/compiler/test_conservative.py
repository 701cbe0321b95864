"""Models that look across positions, at pads too: packing declines or keeps that part padded, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    Batch,
    Pair,
    assert_close,
    batches,
    declined,
    describe,
    expect_packed,
    masked_lm_batch,
)
from tests.compiler.plain_models import DIM, SIZES, VOCAB, Block, Plain, filled, keys, scaled, sdpa_bool

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


POOLS = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "maximum": lambda x: x.amax(1),
    "maximum with index": lambda x: x.max(1).values,
    "average pooling": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1),
    "deviation": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "mean by einsum": lambda x: torch.einsum("bsh->bh", x) / x.shape[1],
    "product with ones": lambda x: (x.transpose(1, 2) @ torch.ones(x.shape[1], 1)).squeeze(-1),
    "attention over itself": lambda x: (x.softmax(1) * x).sum(1),
    "sorted": lambda x: x.sort(1).values[:, 0],
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


class FlatBatchNorm(BatchNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, DIM)).reshape(x.shape)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


ACROSS: dict[str, Callable[[], Any]] = {
    "batch norm": BatchNorm,
    "batch norm of flat tokens": FlatBatchNorm,
    "convolution": Convolution,
    "layer norm over positions too": lambda: lambda x: F.layer_norm(x, x.shape[1:]),
    "running sum": lambda: lambda x: x + 0.1 * x.cumsum(1),
    "mean of all": lambda: lambda x: x - x.mean(),
    "mean of a column": lambda: lambda x: x - x.mean(0, keepdim=True),
    "mean of a row": lambda: lambda x: x - x.mean(1, keepdim=True),
    "mean of rows and positions": lambda: lambda x: x - x.mean((0, 1), keepdim=True),
    "largest of all": lambda: lambda x: x / x.abs().max(),
    "softmax over positions": lambda: lambda x: x * x.softmax(1),
    "shift by one": lambda: lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
    "roll": lambda: lambda x: x + x.roll(1, 1),
    "flip": lambda: lambda x: x + x.flip(1),
    "flip of rows": lambda: lambda x: x + x.flip(0),
    "fourier transform": lambda: lambda x: x + torch.fft.fft(x, dim=1).real * 0.1,
    "first position added to all": lambda: lambda x: x + x[:, :1],
    "difference to the neighbour": lambda: lambda x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "product of positions": lambda: lambda x: x + 0.01 * (x @ x.transpose(1, 2)) @ x,
    "other row added": lambda: lambda x: x + x.roll(1, 0),
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


def causal_chunks(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    near = places[:, None] // 4 == places[None, :] // 4
    return scaled(q, k).masked_fill(~(near & keys(mask)), -1e9).softmax(-1) @ v


def dilated(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    even = (places[:, None] - places[None, :]) % 2 == 0
    return scaled(q, k).masked_fill(~(even & keys(mask)), -1e9).softmax(-1) @ v


def prefix_then_causal(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    seen = (places[None, :] <= places[:, None]) | (places[None, :] < 3)
    return scaled(q, k).masked_fill(~(seen & keys(mask)), -1e9).softmax(-1) @ v


def not_itself(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    eye = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
    return scaled(q, k).masked_fill(eye | ~keys(mask), -1e9).softmax(-1) @ v


def queries_masked(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill((mask == 0)[:, None, :, None], -1e9).softmax(-1) @ v


def pads_only(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(keys(mask), -1e9).softmax(-1) @ v


def mask_off_by_one(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(~keys(mask.roll(1, 1)), -1e9).softmax(-1) @ v


def mask_of_the_next_row(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(~keys(mask.roll(1, 0)), -1e9).softmax(-1) @ v


def softmax_over_queries(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(~keys(mask), -1e9).softmax(-2) @ v


def normalised_twice(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = scaled(q, k).masked_fill(~keys(mask), -1e9).softmax(-1)
    return weights @ v + weights.mean(-1, keepdim=True)


def masked_after_softmax(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (scaled(q, k).softmax(-1) * keys(mask)) @ v


def random_keys(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    far = torch.arange(q.shape[2], device=q.device) > q.shape[2] // 2
    return scaled(q, k).masked_fill(far | ~keys(mask), -1e9).softmax(-1) @ v


def heads_see_different_keys(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    reach = torch.tensor([1, 2, 4, 100], device=q.device)[:, None, None]
    near = (places[:, None] - places[None, :]).abs() <= reach
    return scaled(q, k).masked_fill(~(near & keys(mask)), -1e9).softmax(-1) @ v


def window_of_fractions(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    near = (places[:, None] - places[None, :]).abs() * 0.1 < 2.0
    return scaled(q, k).masked_fill(~(near & keys(mask)), -1e9).softmax(-1) @ v


def window_of_chunks(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    chunks = torch.arange(q.shape[2], device=q.device) // 8
    near = (chunks[:, None] - chunks[None, :]).abs() <= 3
    return scaled(q, k).masked_fill(~(near & keys(mask)), -1e9).softmax(-1) @ v


class WindowInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("near", torch.ones(64, 64, dtype=torch.bool).tril(12).triu(-12))

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        near = self.near[: q.shape[2], : q.shape[2]]
        return scaled(q, k).masked_fill(~(near & keys(mask)), -1e9).softmax(-1) @ v


@pytest.mark.parametrize(
    "attend",
    [
        causal_chunks, dilated, prefix_then_causal, not_itself, queries_masked, pads_only, mask_off_by_one,
        mask_of_the_next_row, softmax_over_queries, normalised_twice, masked_after_softmax, random_keys,
        heads_see_different_keys,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_a_mask_with_another_meaning_is_not_taken_for_a_known_one(attend: Any) -> None:
    train(Plain(attend, layers=1))


@pytest.mark.parametrize(
    "attend",
    [window_of_fractions, window_of_chunks, WindowInABuffer()],
    ids=["fractions", "chunks", "a buffer"],
)
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


class TwoMasks(nn.Module):
    """Its two attentions have masks that differ in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first, self.second = Block(filled), Block(filled)

    def forward(self, input_ids: Any, attention_mask: Any, other: Any, labels: Any) -> torch.Tensor:
        x = self.second(self.first(self.tokens(input_ids), attention_mask), other)
        return F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))


def test_attentions_that_disagree_on_the_tokens_stay_padded() -> None:
    given = batches(masked_lm_batch, *GIVEN)
    for number, batch in enumerate(given):
        other = batch["attention_mask"].clone()
        if number:
            other[:, -2:] = 1
            other[:, 0] = 0
        batch["other"] = other
    assert "disagree" in train(TwoMasks(), given)


def test_one_attention_without_a_mask_among_masked_ones_sees_pads() -> None:
    model = Across(nn.Identity())
    model.second = Block(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v))
    train(model)


# ------------------------------------------------------------------------------------------ losses and sizes


def unreduced_mean(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all positions: ignored ones count as zeros."""
    return F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1), reduction="none").mean()


def mean_of_logits_too(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(x)
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + logits.square().mean()


def masked_but_averaged_over_all(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((model.head(x) ** 2).mean(-1) * mask).mean()


def divided_by_the_number_of_positions(
    model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    total = F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1), reduction="sum")
    return total / (x.shape[0] * x.shape[1])


def scaled_by_length(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = x * mask.sum(1)[:, None, None] / x.shape[1]
    return F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1))


def squared_error_of_all(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model.head(x), torch.zeros(VOCAB).expand(*mask.shape, VOCAB))


def contrast_of_the_first_positions(
    model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    pooled = F.normalize(x[:, 1], dim=-1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(x.shape[0], device=x.device))


@pytest.mark.parametrize(
    "loss",
    [
        unreduced_mean, mean_of_logits_too, masked_but_averaged_over_all, divided_by_the_number_of_positions,
        scaled_by_length, squared_error_of_all, contrast_of_the_first_positions,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
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


def test_what_is_read_of_the_hidden_state_at_pads_is_eagers_never_garbage() -> None:
    """Read through the mask, steps run packed; a late look at pads still finds eager's values."""

    def hidden(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x

    model = Plain(sdpa_bool, hidden, layers=1).train()
    LEDGER.forget()
    compiled = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager"})
    for batch in batches(masked_lm_batch, *SIZES):
        out, wanted = compiled(**batch), model(**batch)
        real = batch["attention_mask"].bool()
        assert_close(out[real], wanted[real], "hidden states")
        out[real].sum().backward()
    expect_packed(LEDGER.report(), steps=4)
    assert_close(out[~real], wanted[~real], "hidden states at pads")
