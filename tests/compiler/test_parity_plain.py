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
    PAD,
    Batch,
    Pair,
    assert_close,
    batches,
    causal_batch,
    declined,
    describe,
    expect_not_packed,
    expect_packed,
    masked_lm_batch,
    padded_because,
    token_mask,
)
from tests.compiler.plain_models import (
    DIM,
    HEADS,
    SIZES,
    VOCAB,
    Attend,
    Block,
    Plain,
    distance,
    filled,
    keys,
    scaled,
    sdpa_bool,
)

# ------------------------------------------------------------------------------------------ spellings of attention


def sdpa(q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)


def bias(mask: torch.Tensor, low: float = -1e9) -> torch.Tensor:
    """0 for a key that is seen, `low` for one that is not."""
    return (1.0 - mask[:, None, None, :].float()) * low


def below(q: torch.Tensor) -> torch.Tensor:
    """Keys that stand before their query, or where it stands."""
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


def lowest(scores: torch.Tensor) -> float:
    return torch.finfo(scores.dtype).min


def softmax_in_float32(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = F.softmax(scaled(q, k).masked_fill(~keys(mask), -1e9), dim=-1, dtype=torch.float32).type_as(q)
    return F.dropout(weights, 0.0, training=True) @ v


def merged(*values: torch.Tensor) -> list[torch.Tensor]:
    """Rows and heads as one dimension."""
    return [each.reshape(-1, *each.shape[2:]) for each in values]


def merged_heads(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    flat_q, flat_k, flat_v = merged(q, k, v)
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    hidden = (mask == 0)[:, None, :].repeat_interleave(HEADS, dim=0)
    return torch.bmm(scores.masked_fill(hidden, -1e9).softmax(-1), flat_v).view(q.shape)


def merged_heads_unmerged_for_the_mask(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    flat_q, flat_k, flat_v = merged(q, k, v)
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    weights = scores.view(*q.shape[:3], -1).masked_fill(~keys(mask), -1e9).softmax(-1)
    return torch.bmm(*merged(weights), flat_v).view(q.shape)


def baddbmm(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    flat_q, flat_k, flat_v = merged(q, k, v)
    flat_bias = merged(bias(mask).expand(*q.shape[:3], q.shape[2]))[0]
    scores = torch.baddbmm(flat_bias, flat_q, flat_k.transpose(1, 2), beta=1.0, alpha=1 / math.sqrt(q.shape[-1]))
    return torch.bmm(scores.softmax(-1), flat_v).view(q.shape)


def einsum(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~keys(mask), -1e9).softmax(-1), v)


def exponentials(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = scaled(q, k).exp() * keys(mask)
    return weights / weights.sum(-1, keepdim=True) @ v


def masked_softly(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (scaled(q, k) + bias(mask, -2.0)).softmax(-1) @ v  # pads are still seen


def slopes(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    steps = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return (scaled(q, k) - distance(q).abs().float() * steps).masked_fill(~keys(mask), -1e9).softmax(-1) @ v


def less_the_maximum(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = scaled(q, k).masked_fill(~keys(mask), -1e9)
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1) @ v


def bounded_below(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = scaled(q, k) + bias(mask, lowest(q)) + 2
    return torch.max(scores, torch.tensor(lowest(q))).softmax(-1) @ v


def sinks(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """A score of each head beside those of the keys, for a value of zeros."""
    column = torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column], dim=-1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def sinks_of_queries(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """A score that each query has of its own, as in Inkling."""
    column = q.square().mean(-1, keepdim=True)
    return torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column], dim=-1).softmax(-1)[..., :-1] @ v


def sinks_of_places(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """A score that follows from where a query stands."""
    column = torch.arange(q.shape[2]).float()[:, None].expand(*q.shape[:3], 1)
    return torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column / 4], dim=-1).softmax(-1)[..., :-1] @ v


def sinks_from_all_queries(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """A score that each query has from all positions of its row, pads too."""
    column = q.mean(-1, keepdim=True).cumsum(2)
    return torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column], dim=-1).softmax(-1)[..., :-1] @ v


def sinks_of_rows(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """A score that is one for all queries of a row, and counts its pads."""
    column = q.mean((-1, -2), keepdim=True).expand(-1, -1, q.shape[2], -1)
    return torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column], dim=-1).softmax(-1)[..., :-1] @ v


def scaled_by_sinks(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """The same as a factor of what attention without sinks returns."""
    scores = scaled(q, k).masked_fill(~keys(mask), -1e9)
    beside = torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, -1, 1)
    factor = (scores.logsumexp(-1) - beside).to(torch.float32).sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v) * factor.unsqueeze(-1).to(v.dtype)


def sinks_dropped_at_the_other_end(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """The column stands behind the keys, and the first key is dropped in its place."""
    column = torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scaled(q, k).masked_fill(~keys(mask), -1e9), column], dim=-1)
    return scores.softmax(-1)[..., 1:] @ v


def causal_and_keys(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return scaled(q, k).masked_fill(~below(q), -1e9).masked_fill(~keys(mask), -1e9).softmax(-1) @ v


PACKED: dict[str, Attend] = {
    "boolean": sdpa_bool,
    "boolean, expanded": lambda q, k, v, m: sdpa(q, k, v, keys(m).expand(-1, HEADS, q.shape[2], -1)),
    "added": lambda q, k, v, m: sdpa(q, k, v, bias(m)),
    "the least number added": lambda q, k, v, m: sdpa(
        q, k, v, torch.zeros(m.shape, dtype=q.dtype).masked_fill(m == 0, lowest(q))[:, None, None, :]
    ),
    "a scale of its own": lambda q, k, v, m: sdpa(q, k, v, keys(m), scale=0.5),
    "grouped": lambda q, k, v, m: sdpa(q, k[:, :2], v[:, :2], keys(m), enable_gqa=True),
    "filled with infinity": lambda q, k, v, m: scaled(q, k).masked_fill(~keys(m), -math.inf).softmax(-1) @ v,
    "filled": filled,
    "where": lambda q, k, v, m: torch.where(keys(m), scaled(q, k), lowest(q)).softmax(-1) @ v,
    "added, spelled out": lambda q, k, v, m: (scaled(q, k) + bias(m, -1e5)).softmax(-1) @ v,
    "query scaled first": lambda q, k, v, m: (
        ((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill(~keys(m), -1e30).softmax(-1) @ v
    ),
    "softmax in float32": softmax_in_float32,
    "causal, and keys": causal_and_keys,
    "merged heads": merged_heads,
    "less the maximum": less_the_maximum,
    "bounded below, a number added": bounded_below,
    "sinks": sinks,
    "sinks of queries": sinks_of_queries,
    "sinks of places": sinks_of_places,
    "scaled by sinks": scaled_by_sinks,
}
# Equal by all means; packed or not is not promised.
OTHERS: dict[str, Attend] = {
    # no query without a key
    "boolean and causal": lambda q, k, v, m: sdpa(q, k, v, keys(m) & below(q) | torch.eye(q.shape[2]).bool()),
    "baddbmm": baddbmm,
    "einsum": einsum,
    "masked before scaling": lambda q, k, v, m: (
        ((q @ k.mT).masked_fill(~keys(m), -1e9) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    ),
    "exponentials": exponentials,
    "masked softly": masked_softly,
    "slopes": slopes,
    "where, of a filled tensor": lambda q, k, v, m: (
        torch.where(keys(m), scaled(q, k), torch.full_like(scaled(q, k), -1e9)).softmax(-1) @ v
    ),
    "sinks dropped at the other end": sinks_dropped_at_the_other_end,
    "sinks from all queries": sinks_from_all_queries,
    "sinks of rows": sinks_of_rows,
    "merged heads, unmerged for the mask": merged_heads_unmerged_for_the_mask,
}


@pytest.mark.slow
@pytest.mark.parametrize("attend", PACKED.values(), ids=PACKED)
def test_attention_is_packed_however_its_mask_is_spelled(attend: Attend) -> None:
    expect_packed(Pair(Plain(attend).train()).train(batches(masked_lm_batch, *SIZES)), steps=4, padded=0)


@pytest.mark.slow
@pytest.mark.parametrize("attend", OTHERS.values(), ids=OTHERS)
def test_unusual_attention_gives_the_same_training_packed_or_not(attend: Attend) -> None:
    report = Pair(Plain(attend).train()).train(batches(masked_lm_batch, *SIZES))
    assert not [each for region in report.regions for each in region.fallbacks], describe(report)
    assert report.total("steps_packed") or any(region.declined for region in report.regions), describe(report)


@pytest.mark.slow
def test_a_causal_model_without_a_mask_leaves_out_what_no_label_needs() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    pair = Pair(Plain(attend).train())
    report = pair.train(batches(causal_batch, (4, 16, "right"), (3, 20, "right"), (5, 13, "right"), prompt=3))
    expect_packed(report, steps=3)


def test_pads_whose_attention_is_nan_in_eager_are_so_here() -> None:
    """A pad before the first token of its row sees no key, and `softmax` of minus infinity alone is NaN."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return scaled(q, k).masked_fill(~(below(q) & keys(mask)), -math.inf).softmax(-1) @ v

    pair = Pair(Plain(attend, layers=1).train())
    report = pair.train(batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (4, 8, "one")))
    expect_packed(report, steps=3, padded=0)
    [left] = batches(masked_lm_batch, (3, 9, "left"))
    for model in (pair.reference, pair.compiled):
        model(**left).backward()
    for one, other in zip(pair.reference.parameters(), pair.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, equal_nan=True)
    assert pair.reference.head.weight.grad.isnan().all()
    assert list(padded_because(LEDGER.report())) == [
        "pads before the first token of a row, which see no key and are NaN"
    ]


def test_pads_far_behind_the_last_token_that_are_nan_in_eager_are_so_here() -> None:
    """Under a window they see no key. Nothing is packed: a part behind that attention would not carry NaN on."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        seen = below(q) & (distance(q) < 3) & keys(mask)
        return scaled(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v

    pair = Pair(Plain(attend, layers=1).train())
    [batch] = batches(masked_lm_batch, (4, 11, "one"))
    for _ in range(2):
        for model in (pair.reference, pair.compiled):
            model.zero_grad()
            model(**batch).backward()
        for one, other in zip(pair.reference.parameters(), pair.model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, equal_nan=True)
    assert pair.reference.head.weight.grad.isnan().all()
    expect_not_packed(LEDGER.report())
    assert declined(LEDGER.report()) == "region: attention: pads see no key, and become NaN"


# ------------------------------------------------------------------------------------------ masks made in the model


@pytest.mark.slow
@pytest.mark.parametrize("made_of", ["ids", "lengths"])
def test_a_mask_that_the_model_makes_trains_as_eager_does(made_of: str) -> None:
    class Made(Plain):
        def forward(self, input_ids: torch.Tensor, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            mask = given != PAD if made_of == "ids" else torch.arange(input_ids.shape[1])[None] < given[:, None]
            return super().forward(input_ids, mask, labels)

    pair = Pair(Made(sdpa_bool).train())
    batches_of_it = batches(masked_lm_batch, *(SIZES if made_of == "ids" else ((4, 11, "right"), (3, 13, "right"))))
    for batch in batches_of_it:
        mask = batch.pop("attention_mask")
        batch["given"] = batch["input_ids"] if made_of == "ids" else mask.sum(1)
    report = pair.train(batches_of_it)
    if made_of == "ids":
        expect_packed(report, steps=4)
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


POOLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean by the mask": lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True),
    "mean by an expanded mask": lambda x, m: (
        (x * m[..., None].expand(x.size()).float()).sum(1) / m[..., None].expand(x.size()).float().sum(1).clamp(1e-9)
    ),
    "mean of what was filled": lambda x, m: x.masked_fill(m[..., None] == 0, 0.0).sum(1) / m.sum(1)[:, None],
    "first": lambda x, m: x[:, 0],
    "last": lambda x, m: x[torch.arange(x.shape[0]), m.sum(1) - 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_pooling_that_respects_the_mask_keeps_the_model_packed(pool: Any) -> None:
    pair = Pair(Plain(sdpa_bool, classify(pool), outputs=3).train())
    expect_packed(pair.train(batches(class_batch, (4, 11, "right"), (3, 13, "right"), (4, 8, "one"))), steps=3)


def each_token(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(words(model, x), labels.view(-1), reduction="none").view(mask.shape)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def row_by_row(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As preference losses do: the log-probability of every row's response."""
    wanted, counted = labels[:, 1:].clamp(min=0), (labels[:, 1:] != IGNORED) & (mask[:, 1:] == 1)
    scores = torch.gather(model.head(x)[:, :-1].log_softmax(-1), 2, wanted.unsqueeze(2)).squeeze(2)
    chosen, rejected = (scores * counted).sum(-1).chunk(2)
    return -F.logsigmoid(chosen.mean() - rejected.mean())


def two_losses(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    extra = (model.head(x).logsumexp(-1) ** 2 * mask).sum() / mask.sum()
    return F.cross_entropy(words(model, x), labels.view(-1)) + 1e-3 * extra


def binary(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = (labels.clamp(min=0)[..., None] == torch.arange(VOCAB, device=x.device)).float()
    losses = F.binary_cross_entropy_with_logits(model.head(x), target, reduction="none").mean(-1)
    return (losses * mask).sum() / mask.sum()


def words(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.head(x).view(-1, VOCAB)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "shifted": lambda model, x, m, labels: F.cross_entropy(
        model.head(x)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
    ),
    "shifted, contiguous": lambda model, x, m, labels: nn.CrossEntropyLoss()(
        model.head(x)[..., :-1, :].contiguous().view(-1, VOCAB).float(), labels[..., 1:].contiguous().view(-1)
    ),
    "classes second": lambda model, x, m, labels: F.cross_entropy(model.head(x).transpose(1, 2), labels),
    "weighted": lambda model, x, m, labels: F.cross_entropy(
        words(model, x), labels.view(-1), weight=torch.linspace(0.5, 1.5, VOCAB), label_smoothing=0.1
    ),
    "summed": lambda model, x, m, labels: (
        F.cross_entropy(words(model, x), labels.view(-1), reduction="sum") / (labels != IGNORED).sum()
    ),
    "each token": each_token,
    "log-probabilities": lambda model, x, m, labels: F.nll_loss(F.log_softmax(words(model, x), -1), labels.view(-1)),
    "row by row": row_by_row,
    "two losses": two_losses,
    "binary": binary,
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_are_packed_however_they_are_spelled(loss: Callable[..., Any]) -> None:
    pair = Pair(Plain(causal_and_keys, loss).train())
    expect_packed(pair.train(batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (6, 9, "holes"))), steps=3)


@pytest.mark.slow
def test_boolean_indexing_of_the_labelled_tokens_trains_as_eager_does() -> None:
    def only_labelled(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        keep = labels.view(-1) != IGNORED
        return F.cross_entropy(words(model, x)[keep], labels.view(-1)[keep])

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
