"""Plain PyTorch models, as users write them: all spellings of attention, mask, pooling and loss train as eager does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    IGNORED,
    Batch,
    Pair,
    assert_close,
    batches,
    causal_batch,
    describe,
    expect_packed,
    masked_lm_batch,
    padded_because,
    token_mask,
)
from tests.compiler.plain_models import DIM, HEADS, SIZES, VOCAB, Attend, Block, Plain, keys, scaled, sdpa_bool

# ------------------------------------------------------------------------------------------ spellings of attention


def sdpa_bool_expanded(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys(mask).expand(-1, HEADS, q.shape[2], -1))


def sdpa_bool_causal(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    whole = keys(mask) & causal
    whole = whole | torch.eye(q.shape[2], dtype=torch.bool, device=q.device)  # no query without a key
    return F.scaled_dot_product_attention(q, k, v, attn_mask=whole)


def sdpa_float(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(1.0 - mask[:, None, None, :].float()) * -1e9)


def sdpa_float_minimum(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask == 0, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None, :])


def sdpa_own_scale(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys(mask), scale=0.5)


def sdpa_grouped(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=keys(mask), enable_gqa=True)


def filled_with_infinity(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(~keys(mask), float("-inf")).softmax(-1) @ v


def filled_with_a_low_number(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return torch.matmul(F.softmax(scaled(q, k).masked_fill(mask[:, None, None, :] == 0, -1e9), dim=-1), v)


def where(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = scaled(q, k)
    return torch.where(keys(mask), scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


def where_filled_tensor(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = scaled(q, k)
    return torch.where(keys(mask), scores, torch.full_like(scores, -1e9)).softmax(-1) @ v


def additive(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (scaled(q, k) + (1 - mask[:, None, None, :].to(q.dtype)) * -10000.0 * 10).softmax(-1) @ v


def query_scaled_first(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.masked_fill(~keys(mask), -1e30).softmax(-1) @ v


def softmax_in_float32(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = F.softmax(scaled(q, k).masked_fill(~keys(mask), -1e9), dim=-1, dtype=torch.float32).type_as(q)
    return F.dropout(weights, 0.0, training=True) @ v


def causal_and_keys(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    length = q.shape[2]
    later = torch.triu(torch.ones(length, length, device=q.device), diagonal=1).bool()
    return scaled(q, k).masked_fill(later, -1e9).masked_fill(~keys(mask), -1e9).softmax(-1) @ v


def merged_heads(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    rows, heads, length, size = q.shape
    q, k, v = (x.reshape(rows * heads, length, size) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(size)
    hidden = (mask == 0)[:, None, :].repeat_interleave(heads, dim=0)
    return torch.bmm(scores.masked_fill(hidden, -1e9).softmax(-1), v).view(rows, heads, length, size)


def merged_heads_unmerged_for_the_mask(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    rows, heads, length, size = q.shape
    q, k, v = (x.reshape(rows * heads, length, size) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(rows, heads, length, length) / math.sqrt(size)
    weights = scores.masked_fill(~keys(mask), -1e9).softmax(-1)
    return torch.bmm(weights.view(rows * heads, length, length), v).view(rows, heads, length, size)


def baddbmm(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    rows, heads, length, size = q.shape
    q, k, v = (x.reshape(rows * heads, length, size) for x in (q, k, v))
    bias = (
        ((1.0 - mask.float()) * -1e9)[:, None, None, :].expand(rows, heads, length, length).reshape(-1, length, length)
    )
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=1 / math.sqrt(size))
    return torch.bmm(scores.softmax(-1), v).view(rows, heads, length, size)


def einsum(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~keys(mask), -1e9).softmax(-1), v)


def masked_before_scaling(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keys(mask), -1e9)
    return (scores / math.sqrt(q.shape[-1])).softmax(-1) @ v


def exponentials(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = scaled(q, k).exp() * keys(mask)
    return weights / weights.sum(-1, keepdim=True) @ v


def masked_softly(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (scaled(q, k) + (1 - mask[:, None, None, :].to(q.dtype)) * -2.0).softmax(-1) @ v  # pads are still seen


def slopes(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    distance = (places[None, :] - places[:, None]).abs().float()
    bias = -distance * torch.tensor([0.5, 0.25, 0.125, 0.0625], device=q.device)[:, None, None]
    return (scaled(q, k) + bias).masked_fill(~keys(mask), -1e9).softmax(-1) @ v


PACKED = [
    sdpa_bool, sdpa_bool_expanded, sdpa_float, sdpa_float_minimum, sdpa_own_scale, sdpa_grouped, filled_with_infinity,
    filled_with_a_low_number, where, additive, query_scaled_first, softmax_in_float32,
    causal_and_keys, merged_heads,
]  # fmt: skip
# Equal by all means; packed or not is not promised.
OTHERS = [
    sdpa_bool_causal, baddbmm, einsum, masked_before_scaling, exponentials, masked_softly, slopes, where_filled_tensor,
    merged_heads_unmerged_for_the_mask,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attend", PACKED, ids=lambda function: function.__name__)
def test_attention_is_packed_however_its_mask_is_spelled(attend: Attend) -> None:
    pair = Pair(Plain(attend).train())
    expect_packed(pair.train(batches(masked_lm_batch, *SIZES)), steps=4, padded=0)


@pytest.mark.slow
@pytest.mark.parametrize("attend", OTHERS, ids=lambda function: function.__name__)
def test_unusual_attention_gives_the_same_training_packed_or_not(attend: Attend) -> None:
    pair = Pair(Plain(attend).train())
    report = pair.train(batches(masked_lm_batch, *SIZES))
    assert not [each for region in report.regions for each in region.fallbacks], describe(report)
    packed = report.total("steps_packed")
    assert packed or any(region.declined for region in report.regions), describe(report)


@pytest.mark.slow
def test_pads_that_attention_sees_softly_are_never_stripped() -> None:
    pair = Pair(Plain(masked_softly).train())
    report = pair.train(batches(masked_lm_batch, *SIZES))
    assert not [change for region in report.regions for change in region.changes if "attention" in change]


@pytest.mark.slow
def test_a_causal_model_without_a_mask_leaves_out_what_no_label_needs() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    pair = Pair(Plain(attend).train())
    report = pair.train(batches(causal_batch, (4, 16, "right"), (3, 20, "right"), (5, 13, "right"), prompt=3))
    expect_packed(report, steps=3)


# ------------------------------------------------------------------------------------------ masks made in the model


class FromIds(nn.Module):
    """Makes its own mask, from the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain(sdpa_bool)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids, input_ids != 1, labels)


@pytest.mark.slow
def test_a_mask_made_from_the_pad_id_is_read_from_the_ids() -> None:
    pair = Pair(FromIds().train())
    given = batches(masked_lm_batch, *SIZES)
    for batch in given:
        del batch["attention_mask"]
    expect_packed(pair.train(given), steps=4)


class FromLengths(nn.Module):
    """Is given lengths, not a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain(sdpa_bool)

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(input_ids.shape[1], device=input_ids.device)[None] < lengths[:, None]
        return self.inner(input_ids, mask, labels)


@pytest.mark.slow
def test_a_mask_made_from_lengths_trains_as_eager_does() -> None:
    pair = Pair(FromLengths().train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"))
    for batch in given:
        batch["lengths"] = batch.pop("attention_mask").sum(1)
    report = pair.train(given)
    assert report.total("steps_packed") or any(region.declined for region in report.regions), describe(report)


def test_a_mask_of_floats_is_packed_while_it_holds_zeros_and_ones_only() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(1.0 - mask[:, None, None, :]) * -1e9)

    pair = Pair(Plain(attend).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"), (4, 10, "right"))
    for batch in given:
        batch["attention_mask"] = batch["attention_mask"].float()
    given[1]["attention_mask"][0, 3] = 1 - 1e-9 * 0.5  # still 1 in float32
    given[2]["attention_mask"][1, 0] = 1 + 1e-6  # neither
    report = pair.train(given)
    expect_packed(report, steps=2, padded=1)
    assert list(padded_because(report)) == ["a mask holds numbers besides 0 and 1"]


def test_an_additive_mask_from_the_caller_is_packed_while_it_hides_or_keeps() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])

    pair = Pair(Plain(attend).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"), (4, 10, "right"))
    for batch in given:
        mask = batch["attention_mask"]
        batch["attention_mask"] = torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))
    given[2]["attention_mask"][1, 0] = -3.0
    expect_packed(pair.train(given), steps=2, padded=1)


@pytest.mark.slow
def test_embeddings_as_input_need_no_ids() -> None:
    class Floats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.block, self.head = nn.Linear(6, DIM), Block(sdpa_bool), nn.Linear(DIM, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            wrong = (self.head(self.block(self.enter(x), mask)) - target) ** 2
            return (wrong * mask[..., None]).sum() / mask.sum()

    pair = Pair(Floats().train())
    generator = torch.Generator().manual_seed(1)
    given = []
    for rows, positions, padding in SIZES:
        mask = token_mask(rows, positions, padding, generator)
        x, target = (torch.randn(rows, positions, size, generator=generator) for size in (6, 2))
        x[mask == 0] = 1e3  # what stands at pads is nobody's business
        given.append({"x": x, "mask": mask, "target": target})
    expect_packed(pair.train(given), steps=4)


# ------------------------------------------------------------------------------------------ pooling and losses


def classify(pool: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(pool(x, mask)), labels)

    return loss


def class_batch(rows: int, positions: int, padding: str, generator: torch.Generator) -> Batch:
    batch = masked_lm_batch(rows, positions, padding, generator)
    return {**batch, "labels": torch.randint(0, 3, (rows,), generator=generator)}


def mean_with_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def mean_with_float_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    factor = mask.unsqueeze(-1).expand(x.size()).float()
    return (x * factor).sum(1) / torch.clamp(factor.sum(1), min=1e-9)


def mean_of_filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(mask[..., None] == 0, 0.0).sum(1) / mask.sum(1)[:, None]


def first(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0], device=x.device), mask.sum(1) - 1]


@pytest.mark.slow
@pytest.mark.parametrize("pool", [mean_with_mask, mean_with_float_mask, mean_of_filled, first, last])
def test_pooling_that_respects_the_mask_keeps_the_model_packed(pool: Any) -> None:
    pair = Pair(Plain(sdpa_bool, classify(pool), outputs=3).train())
    expect_packed(pair.train(batches(class_batch, (4, 11, "right"), (3, 13, "right"), (4, 8, "one"))), steps=3)


def shifted(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(x)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def shifted_contiguous(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, wanted = model.head(x)[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, VOCAB).float(), wanted.view(-1))


def classes_second(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(x).transpose(1, 2), labels)


def weighted(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, VOCAB, device=x.device)
    return F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1), weight=weight, label_smoothing=0.1)


def summed(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1), reduction="sum")
    return total / (labels != IGNORED).sum()


def each_token(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1), reduction="none").view(mask.shape)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def log_probabilities(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(model.head(x), -1).view(-1, VOCAB), labels.view(-1))


def row_by_row(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As preference losses do: the log-probability of every row's response."""
    wanted, counted = labels[:, 1:].clamp(min=0), (labels[:, 1:] != IGNORED) & (mask[:, 1:] == 1)
    scores = torch.gather(model.head(x)[:, :-1].log_softmax(-1), 2, wanted.unsqueeze(2)).squeeze(2)
    chosen, rejected = (scores * counted).sum(-1).chunk(2)
    return -F.logsigmoid(chosen.mean() - rejected.mean())


def two_losses(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(x)
    extra = (logits.logsumexp(-1) ** 2 * mask).sum() / mask.sum()
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + 1e-3 * extra


def binary(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = (labels.clamp(min=0)[..., None] == torch.arange(VOCAB, device=x.device)).float()
    losses = F.binary_cross_entropy_with_logits(model.head(x), target, reduction="none").mean(-1)
    return (losses * mask).sum() / mask.sum()


def only_labelled(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    keep = labels.view(-1) != IGNORED
    return F.cross_entropy(model.head(x).view(-1, VOCAB)[keep], labels.view(-1)[keep])


LOSSES = [
    shifted, shifted_contiguous, classes_second, weighted, summed, each_token, log_probabilities, row_by_row,
    two_losses, binary,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_losses_are_packed_however_they_are_spelled(loss: Callable[..., Any]) -> None:
    pair = Pair(Plain(causal_and_keys, loss).train())
    given = batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (6, 9, "holes"))
    expect_packed(pair.train(given), steps=3)


@pytest.mark.slow
def test_boolean_indexing_of_the_labelled_tokens_trains_as_eager_does() -> None:
    pair = Pair(Plain(sdpa_bool, only_labelled).train())
    pair.train(batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left")))


def test_logits_beside_the_loss_have_eagers_values_where_they_are_taken_by_the_mask() -> None:
    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = model.head(x)
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)), logits

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch["attention_mask"].bool()
        assert_close(found[1][real], expected[1][real], "logits")

    pair = Pair(Plain(sdpa_bool, loss).train())
    expect_packed(pair.train(batches(masked_lm_batch, *SIZES), compare), steps=4)


@pytest.mark.slow
def test_a_loss_outside_of_the_compiled_model_reaches_every_weight() -> None:
    def logits_only(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.head(x)

    def call(model: Any, **batch: Any) -> torch.Tensor:
        logits = model(**batch)
        return F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1), label_smoothing=0.1)

    pair = Pair(Plain(sdpa_bool, logits_only).train(), call=call)
    expect_packed(pair.train(batches(masked_lm_batch, *SIZES)), steps=4)


def test_the_loss_is_compiled_together_with_the_model_in_one_function() -> None:
    model = Plain(sdpa_bool, lambda model, x, mask, labels: model.head(x)).train()
    reference = copy.deepcopy(model)

    def step(module: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(module(**batch).flatten(0, 1), batch["labels"].flatten())

    LEDGER.forget()
    compiled = torch.compile(lambda batch: step(model, batch), backend="deepytorch", options={"lowering": "aot_eager"})
    for batch in batches(masked_lm_batch, *SIZES):
        expected, found = step(reference, batch), compiled(batch)
        assert_close(found, expected, "loss")
        expected.backward()
        found.backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    expect_packed(LEDGER.report(), steps=4)


# ------------------------------------------------------------------------------------------ torch.nn's own modules


class Attends(nn.Module):
    """`nn.MultiheadAttention` with a key padding mask."""

    def __init__(self, batch_first: bool, need_weights: bool, causal: bool = False) -> None:
        super().__init__()
        self.batch_first, self.need_weights, self.causal = batch_first, need_weights, causal
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        length = input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        hidden = attention_mask == 0
        out, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=self.need_weights, attn_mask=later)
        out = x + out
        out = out if self.batch_first else out.transpose(0, 1)
        return F.cross_entropy(self.head(out).reshape(-1, VOCAB), labels.reshape(-1))


@pytest.mark.parametrize(
    "batch_first, need_weights, causal",
    [
        (True, False, False),
        pytest.param(False, False, False, marks=pytest.mark.slow),
        pytest.param(True, True, False, marks=pytest.mark.slow),
        (False, False, True),
    ],
    ids=["batch first", "positions first", "with weights", "causal, positions first"],
)
def test_multihead_attention_is_packed(batch_first: bool, need_weights: bool, causal: bool) -> None:
    pair = Pair(Attends(batch_first, need_weights, causal).train())
    sizes = [(4, 11, "right"), (3, 13, "right"), (4, 8, "one")]  # a row whose first key is hidden from its query is NaN
    expect_packed(pair.train(batches(masked_lm_batch, *sizes)), steps=3)


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with `src_key_padding_mask`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, **kwargs)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.batch_first = bool(kwargs.get("batch_first"))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        x = x if self.batch_first else x.transpose(0, 1)
        return F.cross_entropy(self.head(x).reshape(-1, VOCAB), labels.reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [{"batch_first": True}, {"batch_first": False}, {"batch_first": True, "norm_first": True, "activation": "gelu"}],
    ids=["batch first", "positions first", "norm first"],
)
def test_transformer_encoder_is_packed_in_training(kwargs: dict[str, Any]) -> None:
    pair = Pair(Encoder(**kwargs).train())
    expect_packed(pair.train(batches(masked_lm_batch, *SIZES)), steps=4)


@pytest.mark.matrix
def test_transformer_encoder_of_inductor_trains_as_eager_does() -> None:
    pair = Pair(Encoder(batch_first=True).train(), options={"lowering": "inductor"})
    expect_packed(pair.train(batches(masked_lm_batch, *SIZES)), steps=4)
