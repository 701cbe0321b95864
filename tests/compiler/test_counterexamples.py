"""Small models on each of which an earlier, plausible form of the analyses would have trained on wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.parity import (
    IGNORED,
    PAD,
    Batch,
    Pair,
    assert_close,
    batches,
    causal_batch,
    describe,
    expect_packed,
    masked_lm_batch,
)
from tests.compiler.plain_models import (
    DIM,
    HEADS,
    VOCAB,
    Block,
    Plain,
    attended,
    distance,
    filled,
    keys,
    sdpa_bool,
)  # fmt: skip

GIVEN = ((4, 11, "right"), (3, 13, "left"), (5, 9, "holes"))

pytestmark = pytest.mark.slow


def train(model: nn.Module, given: list[Batch] | None = None, **kwargs: Any) -> Any:
    report = Pair(model.train(), **kwargs).train(given or batches(masked_lm_batch, *GIVEN))
    assert not [each for region in report.regions for each in region.fallbacks], describe(report)
    assert report.total("steps_packed") or any(r.declined or r.padded_because for r in report.regions), describe(report)
    return report


class Words(nn.Module):
    """Embedding, then whatever `between` does, then one masked block, then the loss."""

    def __init__(self, between: Any = None, attend: Any = sdpa_bool) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(VOCAB, DIM), Block(attend), nn.Linear(DIM, VOCAB)
        self.between = between

    def hidden(self, input_ids: Any, attention_mask: Any) -> torch.Tensor:
        x = self.tokens(input_ids)
        x = x if self.between is None else self.between(x)
        return self.block(x, attention_mask)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        return F.cross_entropy(self.head(self.hidden(input_ids, attention_mask)).flatten(0, 1), labels.flatten())


# ------------------------------------------------------------------------------------------ what a token is


class PadIdInABuffer(Words):
    """What a pad is, is a number that somebody may change; it is not known when the region is analysed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pad", torch.tensor(PAD))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return super().forward(input_ids, input_ids != self.pad, labels)


def test_the_pad_id_in_a_buffer_may_change_between_steps() -> None:
    pair = Pair(PadIdInABuffer().train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (4, 9, "right"))
    for batch in given:
        mask = batch.pop("attention_mask")
        batch["input_ids"][:, 0] = 7
        batch["labels"][mask == 0] = IGNORED
    pair.step(given[0])
    for model in (pair.reference, pair.model):
        model.pad.fill_(2)
    for batch in given[1:]:
        batch["input_ids"].masked_fill_(batch["input_ids"] == PAD, 2)
        pair.step(batch)


@pytest.mark.parametrize("pad", [0, 3, VOCAB - 1, -1], ids=["zero", "small", "last word", "negative sentinel"])
def test_a_mask_from_ids_knows_which_id_is_the_pad(pad: int) -> None:
    class FromIds(Words):
        def forward(self, input_ids: Any, labels: Any) -> Any:
            return super().forward(input_ids.clamp(min=0), input_ids != pad, labels)

    given = batches(masked_lm_batch, *GIVEN)
    for batch in given:
        mask = batch.pop("attention_mask")
        batch["input_ids"] = (
            batch["input_ids"].masked_fill(mask == 0, pad).masked_fill((mask == 1) & (batch["input_ids"] == pad), 9)
        )
    train(FromIds(), given)


@pytest.mark.parametrize("least", [5, 40, 90])
def test_a_mask_from_a_range_of_ids_is_not_taken_for_one_pad_id(least: int) -> None:
    class Range(Words):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            return super().forward(input_ids, (input_ids >= least) | (attention_mask == 1), labels)

    train(Range())


def late(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """As `filled`, but every key past the 30th position is seen, pad or not."""
    return attended(q, k, v, keys(mask) | (torch.arange(q.shape[2]) >= 30))


class TwoAttentions(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first, self.second = Block(first), Block(second)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        x = self.second(self.first(self.tokens(input_ids), attention_mask), attention_mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_masks_that_differ_only_at_late_positions_are_told_apart() -> None:
    train(TwoAttentions(filled, late), batches(masked_lm_batch, (4, 9, "right"), (3, 48, "right"), (4, 40, "left")))


class TwoSides(nn.Module):
    """An encoder whose two attentions do not agree on what a token is, and a decoder with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first, self.second, self.target = Block(filled), Block(filled), Block(filled)

    def forward(self, input_ids: Any, attention_mask: Any, other: Any, target_ids: Any, target_mask: Any, labels: Any):
        source = self.second(self.first(self.tokens(input_ids), attention_mask), other)
        pooled = (source * other[..., None]).sum(1) / other.sum(1, keepdim=True)
        x = self.target(self.tokens(target_ids) + pooled[:, None], target_mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_one_side_that_disagrees_on_its_tokens_stays_padded_beside_one_that_is_packed() -> None:
    sources = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"), (5, 9, "holes"))
    targets = batches(masked_lm_batch, (4, 7, "right"), (3, 8, "left"), (5, 6, "right"), seed=2)
    given = []
    for source, target in zip(sources, targets, strict=True):
        other = source["attention_mask"].clone()
        other[:, ::2] = 1
        given.append(
            {
                "input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "other": other,
                "target_ids": target["input_ids"], "target_mask": target["attention_mask"], "labels": target["labels"],
            }
        )  # fmt: skip
    expect_packed(train(TwoSides(), given), steps=3)


# ------------------------------------------------------------------------------------------ which position is which


REORDERED = {
    "index": lambda x: x + x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "cat to the left": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "cat to the right": lambda x: torch.cat([x[:, -1:], x[:, :-1]], 1),
    "gather": lambda x: x + x.gather(1, (x.shape[1] - 1 - torch.arange(x.shape[1]))[None, :, None].expand_as(x)),
    "index_select": lambda x: x + torch.index_select(x, 1, torch.arange(x.shape[1] - 1, -1, -1)),
    "unfold and flip": lambda x: x + x.unfold(1, 1, 1).squeeze(-1).flip(1),
}


@pytest.mark.parametrize("between", REORDERED.values(), ids=REORDERED)
def test_positions_in_another_order_are_not_the_same_positions(between: Any) -> None:
    train(Words(between))


def test_a_position_of_the_callers_added_in_front_shifts_all_others() -> None:
    class Prefixed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.randn(1, 1, DIM))

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            x = torch.cat([self.start.expand(input_ids.shape[0], -1, -1), self.tokens(input_ids)], 1)
            mask = F.pad(attention_mask, (1, 0), value=1)
            return F.cross_entropy(self.head(self.block(x, mask))[:, 1:].flatten(0, 1), labels.flatten())

    train(Prefixed())


def test_a_pick_behind_another_dimension_takes_the_position_it_names() -> None:
    class Stacked(Words):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            x = self.hidden(input_ids, attention_mask)
            both = torch.stack([x, 2 * x])  # (2, rows, positions, channels)
            return F.cross_entropy(self.head(both[:, :, 0].sum(0)), labels[:, 0].clamp(min=0))

    train(Stacked(), batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (2, 9, "right")))


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "positions"])
def test_a_pick_of_a_row_is_no_pick_of_a_position(dim: int) -> None:
    class Picks(Words):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            x = self.hidden(input_ids, attention_mask)
            picked = x.select(dim, 1)
            return F.cross_entropy(self.head(picked), labels.select(dim, 1).clamp(min=0))

    train(Picks(), batches(masked_lm_batch, (4, 11, "holes"), (3, 13, "holes"), (5, 9, "holes")))


# ------------------------------------------------------------------------------------------ what attention pairs up


def test_causal_attention_over_heads_is_not_causal_over_positions() -> None:
    def over_heads(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (rows, positions, heads, size): attends over heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    train(TwoAttentions(over_heads, sdpa_bool))


def in_groups(q: Any, k: Any, v: Any, mask: Any, groups: tuple[int, int], dim: int) -> torch.Tensor:
    """Two key heads, which the queries of a group share; `dim` is theirs among `groups`."""
    q, k, v = q.unflatten(1, groups), k[:, :2].unsqueeze(3 - dim), v[:, :2].unsqueeze(3 - dim)
    return attended(q, k, v, keys(mask)[:, None]).flatten(1, 2)


def repeated(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """Key heads tiled (0 1 0 1), not repeated in place (0 0 1 1)."""
    k, v = (x[:, :2].repeat(1, HEADS // 2, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys(mask))


SHARED_HEADS = {
    "head h reads h % 2": lambda *given: in_groups(*given, (HEADS // 2, 2), 2),
    "head h reads h // 2": lambda *given: in_groups(*given, (2, HEADS // 2), 1),
    "repeated": repeated,
}


@pytest.mark.parametrize("attend", SHARED_HEADS.values(), ids=SHARED_HEADS)
def test_shared_key_heads_pair_up_as_the_model_says(attend: Any) -> None:
    train(Plain(attend, layers=1))


# ------------------------------------------------------------------------------------------ losses


def shifted_unreduced(model: Any, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(model.head(x)[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def unreduced_with_gaps(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean of rows' means, where an ignored label counts as zero."""
    losses = F.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none")
    return losses.mean(1).sum() + losses.square().mean()


def several_labels_a_token(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Two predictions a token, (rows, positions, 2, words), of which one may be ignored."""
    logits = torch.stack([model.head(x), model.head(-x)], 2)
    both = torch.stack([labels, labels.roll(1, 0).masked_fill(mask == 0, IGNORED)], 2)
    return F.cross_entropy(logits.flatten(0, 2), both.flatten())


LOSSES = {
    "weighted by the predicted token": lambda model, x, mask, labels: shifted_unreduced(model, x, labels, mask[:, 1:]),
    "by the predicting one": lambda model, x, mask, labels: shifted_unreduced(model, x, labels, mask[:, :-1]),
    "with gaps": unreduced_with_gaps,
    "several labels a token": several_labels_a_token,
    "of another row": lambda model, x, _, labels: F.cross_entropy(
        model.head(x).flatten(0, 1), labels.flip(0).flatten()
    ),
    "logits by row, labels by column": lambda model, x, _, labels: F.cross_entropy(
        model.head(x).flatten(0, 1), labels.t().reshape(-1)
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_that_look_like_a_plain_one(loss: Any) -> None:
    train(Plain(sdpa_bool, loss, layers=1), batches(causal_batch, *GIVEN))


def test_a_shifted_unreduced_loss_is_packed_where_its_weights_ignore_pads() -> None:
    model = Plain(sdpa_bool, LOSSES["weighted by the predicted token"], layers=1)
    expect_packed(train(model, batches(causal_batch, (4, 11, "right"), (3, 13, "right"))), steps=2)


# ------------------------------------------------------------------------------------------ writes


def written(x: torch.Tensor, write: Any) -> torch.Tensor:
    y = x * 1.0
    z = y.view(y.shape)
    write(y)
    return y + z


WRITES = {
    "a view": lambda y: y[:, :1].mul_(3.0),
    "a split": lambda y: y.detach().split(DIM // 2, -1)[0].add_(3.0),  # autograd allows none to what split gives
    "a flat view": lambda y: y.view(-1, DIM)[2].mul_(3.0),
    "what was viewed before": lambda y: y.add_(1.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_through_views_reach_what_they_reach_in_eager(write: Any) -> None:
    train(Words(lambda x: written(x, write)))


class Statistics(Words):
    """Keeps a running mean of its hidden states, written in every step."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        x = self.hidden(input_ids, attention_mask)
        with torch.no_grad():
            factor = attention_mask[..., None] if self.masked else torch.ones_like(attention_mask)[..., None]
            self.mean.mul_(0.9).add_((x * factor).sum((0, 1)) / factor.sum(), alpha=0.1)
            self.steps.add_(1)
        logits = self.head(x - self.mean)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("masked", [True, False], ids=["over tokens", "over all positions"])
def test_statistics_are_written_once_a_step(masked: bool) -> None:
    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch["attention_mask"].bool()
        assert_close(found[1][real], expected[1][real], "logits", rel=1e-4)

    pair = Pair(Statistics(masked).train())
    pair.train(batches(masked_lm_batch, *GIVEN, (4, 10, "right")), compare)
    assert pair.model.steps.item() == pair.reference.steps.item() == 4
    assert_close(pair.model.mean, pair.reference.mean, "running mean", rel=1e-4)


# ------------------------------------------------------------------------------------------ modes, outputs


@pytest.mark.parametrize("mode", ["autocast", "autocast, then float", "no_grad"])
def test_outputs_made_under_a_mode_of_the_models_own(mode: str) -> None:
    class Island(Words):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            x = self.hidden(input_ids, attention_mask)
            loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
            if mode == "no_grad":
                with torch.no_grad():
                    shown = self.head(x).softmax(-1)
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    shown = self.head(x) if mode == "autocast" else self.head(x).float().square()
            return loss, shown

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch["attention_mask"].bool()
        assert found[1].requires_grad == expected[1].requires_grad
        tight = 1e-5 if mode == "no_grad" else 1e-2
        assert found[1].dtype == expected[1].dtype
        assert_close(found[1][real].float(), expected[1][real].float(), "shown", rel=tight, floor=1e-6)

    train_with = Pair(Island().train())
    train_with.train(batches(masked_lm_batch, *GIVEN), compare)


def test_integers_beside_the_loss_of_a_model_without_a_mask_are_eagers() -> None:
    """A causal model is cut after its last label; what it predicts there is still asked for."""

    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
            self.block = Block(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True))

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            logits = self.head(self.block(self.tokens(input_ids), attention_mask))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return loss, logits.argmax(-1)

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        assert torch.equal(found[1], expected[1])

    pair = Pair(Predicts().train())
    pair.train(batches(causal_batch, (4, 11, "right"), (3, 13, "right"), (4, 9, "right")), compare)


# ------------------------------------------------------------------------------------------ what a forward hides


class Rounded(torch.autograd.Function):
    """Straight-through: what the backward does is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 0.5 * gradient


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y.register_hook(lambda gradient: 0.1 * gradient)
    return y


def changed(x: torch.Tensor, change: Any, through_data: bool = False) -> torch.Tensor:
    """A value that autograd does not see change."""
    y = x * 2.0
    with torch.no_grad():
        change(y.data if through_data else y)
    return y


HIDDEN = {
    "custom autograd function": lambda x: Rounded.apply(4 * x) / 4,
    "straight through, spelled out": lambda x: x + (x.round() - x).detach(),
    "gradient hook": hooked,
    "clamp_ through .data": lambda x: changed(x, lambda y: y.clamp_(-1, 1), through_data=True),
    "clamp_ under no_grad": lambda x: changed(x, lambda y: y.clamp_(-1, 1)),
    "mul_ under no_grad": lambda x: changed(x, lambda y: y.mul_(0.5)),
    "half of the gradient": lambda x: 0.5 * x + (0.5 * x).detach(),
    "vmap": lambda x: torch.func.vmap(lambda row: row * row.abs().clamp(max=1))(x),
}


@pytest.mark.parametrize("between", HIDDEN.values(), ids=HIDDEN)
def test_gradients_that_are_no_derivative_of_the_forward_are_kept(between: Any) -> None:
    train(Words(between))


# ------------------------------------------------------------------------------------------ what a mask rests on


def test_a_mask_from_a_table_of_special_ids() -> None:
    class Lookup(Words):
        def __init__(self) -> None:
            super().__init__()
            special = torch.zeros(VOCAB, dtype=torch.bool)
            special[[0, 50, 80]] = True
            self.register_buffer("special", special)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return super().forward(input_ids, ~self.special[input_ids], labels)

    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"))
    for batch in given:
        mask = batch.pop("attention_mask")
        batch["input_ids"] = batch["input_ids"].clamp(max=40).masked_fill(mask == 0, 0)
        batch["input_ids"][:, 3] = 50
        batch["labels"][:, 3] = IGNORED
    train(Lookup(), given)


class Reach(Words):
    """A window as wide as the caller says."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, reach: Any) -> Any:
        def near(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
            return attended(q, k, v, keys(mask) & (distance(q).abs() < reach))

        self.block.attend = near
        return super().forward(input_ids, attention_mask, labels)


def test_a_window_that_the_caller_changes_is_followed() -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (5, 9, "right"), (4, 10, "right"))
    for batch, reach in zip(given, (2, 3, 9, 4), strict=True):
        batch["reach"] = reach
    train(Reach(), given)


def test_a_buffer_that_grows_a_window_is_written_once_a_step() -> None:
    class Curriculum(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            self.steps += 1

            def near(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
                return attended(q, k, v, keys(mask) & (distance(q).abs() <= self.steps))

            self.block.attend = near
            return super().forward(input_ids, attention_mask, labels)

    pair = Pair(Curriculum().train())
    pair.train(batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (5, 9, "right")))
    assert pair.model.steps.item() == pair.reference.steps.item() == 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_two_sides_of_the_same_length_are_two_sides(dynamic: bool | None) -> None:
    """Source and target are padded to one length here; what is a pad in the one is none in the other."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=DIM, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=DIM, decoder_ffn_dim=DIM, dropout=0.0, max_position_embeddings=64,
    )  # fmt: skip

    def call(model: Any, labels: Any, **batch: Any) -> torch.Tensor:
        logits = model(**batch).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"), (4, 9, "right"))
    generator = torch.Generator().manual_seed(3)
    for batch in given:
        target = torch.randint(5, VOCAB, batch["input_ids"].shape, generator=generator)
        batch.update(decoder_input_ids=target, labels=target.roll(-1, 1))
    model = transformers.BartForConditionalGeneration(config).train()
    expect_packed(Pair(model, call=call, dynamic=dynamic).train(given), steps=3)


class SharedPlaces(nn.Module):
    """Source and target are added the same embeddings of positions, so that they have one length."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM), nn.Linear(DIM, VOCAB)
        self.source, self.query, self.key = Block(sdpa_bool), nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.target = Block(lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        self.causal = causal

    def forward(self, input_ids: Any, attention_mask: Any, target_ids: Any) -> torch.Tensor:
        places = self.places(torch.arange(input_ids.shape[1]))
        memory = self.source(self.tokens(input_ids) + places, attention_mask)
        x = self.tokens(target_ids) + places
        x = self.target(x, None) if self.causal else x
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (self.query(x), *self.key(memory).chunk(2, -1)))
        return self.head(x + sdpa_bool(q, k, v, attention_mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False], ids=["causal target", "queries only"])
def test_two_sides_that_share_their_positions_are_two_sides(causal: bool) -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"))
    generator = torch.Generator().manual_seed(3)
    for batch in given:
        batch["target_ids"] = torch.randint(5, VOCAB, batch["input_ids"].shape, generator=generator)

    def call(model: Any, labels: Any, **batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(**batch).flatten(0, 1), batch["target_ids"].roll(-1, 1).flatten())

    train(SharedPlaces(causal), given, call=call)


def test_a_mask_from_a_long_list_of_special_ids() -> None:
    class IsIn(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("special", torch.cat([torch.tensor([0]), torch.arange(200, 280)]))

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return super().forward(input_ids % VOCAB, ~torch.isin(input_ids, self.special), labels)

    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"))
    for batch in given:
        batch["input_ids"] = batch["input_ids"].masked_fill(batch.pop("attention_mask") == 0, 0)
        batch["input_ids"][:, 3] = 250
        batch["labels"][:, 3] = IGNORED
    expect_packed(train(IsIn(), given), steps=2)


class WindowInABuffer(Words):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reach", torch.tensor(3))

        def near(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
            return attended(q, k, v, keys(mask) & (distance(q).abs() < self.reach))

        self.block.attend = near


def test_a_window_changed_through_data_is_noticed() -> None:
    model, reference = WindowInABuffer().train(), WindowInABuffer().train()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager"})
    for number, batch in enumerate(batches(masked_lm_batch, *[(4, 11, "right")] * 3)):
        if number == 1:
            for each in (model, reference):
                each.reach.data.fill_(6)
        assert_close(compiled(**batch), reference(**batch), "loss")


def test_labels_made_with_a_counter_count_once() -> None:
    class Counting(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            self.steps += 1
            shifted = torch.where(labels == IGNORED, labels, (labels + self.steps) % VOCAB)
            return super().forward(input_ids, attention_mask, shifted)

    pair = Pair(Counting().train())
    pair.train(batches(masked_lm_batch, *GIVEN))
    assert pair.model.steps.item() == pair.reference.steps.item() == 3


def test_numbers_that_the_caller_changes_scale_what_they_scale() -> None:
    class Scaled(Words):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any, times: Any, fraction: Any) -> Any:
            x = self.hidden(input_ids, attention_mask) * times * fraction
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    given = batches(masked_lm_batch, *GIVEN, (4, 10, "right"))
    for number, batch in enumerate(given):
        batch.update(times=number + 2, fraction=0.3 + 0.1 * number)
    expect_packed(train(Scaled(), given))


def test_sizes_declared_dynamic_by_the_caller_are_packed_too() -> None:
    report = train(Plain(filled, layers=1), dynamic=True)
    expect_packed(report, steps=3)
