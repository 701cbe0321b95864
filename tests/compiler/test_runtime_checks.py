"""What only the batch can tell: each assumption that does not hold runs that batch padded, counted, with its reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    COMPILED,
    IGNORED,
    Batch,
    Pair,
    assert_same_parameters,
    batches,
    causal_batch,
    describe,
    expect_packed,
    masked_lm_batch,
    padded_because,
    token_mask,
)
from tests.compiler.plain_models import DIM, VOCAB, Block, Plain, attended, distance, filled, keys, sdpa_bool

LABEL_AT_PAD = "a label at a padded position is not ignored"
HOLES = "holes between the tokens of a row under a sliding window"
NO_TOKEN = "a row without a token"
TOO_FEW = "fewer than two tokens or labels"
HARDLY_ANY = "hardly any padding in the batch"
PICKED_A_PAD = "a position that is read from every row is a pad in one"
NOT_ZERO = "a factor is not zero at padded positions"
LATE_TOKENS = "tokens after pads under a causal attention without a key mask"
BUFFER_CHANGED = "a buffer that the mask is made from has changed"


def check(pair: Pair, given: list[Batch], reasons: dict[str, int]) -> None:
    """Train on all batches; those for the reasons run padded, all others packed."""
    report = pair.train(given)
    assert padded_because(report) == reasons, describe(report)
    expect_packed(report, steps=len(given) - sum(reasons.values()), padded=sum(reasons.values()))


def test_each_batch_of_which_something_does_not_hold_runs_padded_and_those_between_packed() -> None:
    """Compiled from a batch without padding; a label at a pad is seen if it is the only one."""
    sizes = [
        ((4, 11, "none"), HARDLY_ANY),
        ((3, 13, "left"), None),
        ((4, 9, "holes"), LABEL_AT_PAD),
        ((3, 12, "right"), None),
        ((4, 12, "none"), HARDLY_ANY),
        ((4, 11, "right"), LABEL_AT_PAD),
        ((4, 12, "right"), TOO_FEW),
        ((3, 9, "holes"), None),
        ((4, 12, "right"), TOO_FEW),
        ((4, 11, "right"), None),
        ((4, 12, "right"), None),
    ]
    *given, without_a_label = batches(masked_lm_batch, *(size for size, _ in sizes))
    for batch in (given[0], given[1], given[4], given[7]):
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    given[2]["labels"] = given[2]["input_ids"].clone()  # at every pad
    row, column = (given[5]["attention_mask"] == 0).nonzero()[0].tolist()
    given[5]["labels"][row, column] = 7  # at one
    given[6]["attention_mask"][:, 1:] = 0  # rows of one token each
    given[6]["labels"][:, 1:] = IGNORED
    given[8]["labels"] = torch.full_like(given[8]["labels"], IGNORED)
    given[8]["labels"][0, 0] = 9  # the only one
    pair = Pair(Plain(sdpa_bool, layers=1).train())
    for batch, (_, reason) in zip(given, sizes, strict=False):
        before = padded_because(LEDGER.report())
        pair.step(batch)
        more = {why: count - before.get(why, 0) for why, count in padded_because(LEDGER.report()).items()}
        assert {why: count for why, count in more.items() if count} == ({reason: 1} if reason else {})
    assert_same_parameters(pair.reference, pair.model)
    expect_packed(LEDGER.report(), steps=4, padded=6)
    without_a_label["labels"].fill_(IGNORED)
    assert pair.reference(**without_a_label).isnan()
    assert pair.compiled(**without_a_label).isnan()


@pytest.mark.slow
def test_the_first_token_after_left_padding_counts_where_its_label_does() -> None:
    """A shifted loss has the last pad predict it: that loss is eager's, so the padded step runs."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=96
    )
    given = batches(causal_batch, (4, 11, "left"), (3, 13, "left"), (3, 11, "left"))
    given[1]["labels"] = given[1]["input_ids"].masked_fill(given[1]["attention_mask"] == 0, IGNORED)
    check(Pair(transformers.LlamaForCausalLM(config).train()), given, {LABEL_AT_PAD: 1})


def test_a_row_of_pads_runs_padded() -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (4, 11, "right"))
    given[1]["attention_mask"][2] = 0
    given[1]["labels"][2] = IGNORED
    check(Pair(Plain(filled, layers=1).train()), given, {NO_TOKEN: 1})


@pytest.mark.parametrize(
    ("position", "token", "pad"), [(0, "right", "left"), pytest.param(-1, "left", "right", marks=pytest.mark.slow)]
)
def test_a_pooled_position_that_is_a_pad_in_one_row_runs_padded(position: int, token: str, pad: str) -> None:
    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(x[:, position]), labels[:, 0].clamp(min=0) % 3)

    given = batches(masked_lm_batch, (4, 11, token), (4, 12, pad), (3, 10, token))
    check(Pair(Plain(sdpa_bool, loss, outputs=3, layers=1).train()), given, {PICKED_A_PAD: 1})


class OwnFactor(nn.Module):
    """Pools with a mask of its own beside the attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(VOCAB, DIM), Block(sdpa_bool), nn.Linear(DIM, 3)

    def forward(self, input_ids: Any, attention_mask: Any, pool: Any, labels: Any) -> torch.Tensor:
        x = self.block(self.tokens(input_ids), attention_mask)
        return F.cross_entropy(self.head((x * pool[..., None]).sum(1) / pool.sum(1, keepdim=True)), labels)


@pytest.mark.slow
def test_a_factor_that_keeps_pads_runs_padded() -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (4, 12, "left"), (3, 10, "right"))
    for number, batch in enumerate(given):
        mask = batch["attention_mask"]
        batch["pool"] = torch.ones_like(mask) if number == 1 else mask.clone()
        batch["labels"] = torch.randint(0, 3, (mask.shape[0],))
    check(Pair(OwnFactor().train()), given, {NOT_ZERO: 1})


class CausalBuffer(nn.Module):
    """Its causal mask is a buffer, as in many a hand-written GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return attended(q, k, v, self.seen[: q.shape[2], : q.shape[2]] & keys(mask))


@pytest.mark.slow
def test_a_buffer_that_a_mask_is_made_from_is_watched() -> None:
    pair = Pair(Plain(CausalBuffer(), layers=1).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (4, 12, "left"), (3, 10, "right"))
    for batch in given[:2]:
        pair.step(batch)
    for model in (pair.reference, pair.model):
        for block in model.blocks:
            block.attend.seen.fill_(True)
    pair.step(given[2])
    report = LEDGER.report()
    assert padded_because(report) == {BUFFER_CHANGED: 1}, describe(report)
    expect_packed(report, steps=2, padded=1)


class HalfMasked(nn.Module):
    """A causal attention without a mask, then one with."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first = Block(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        self.second = Block(filled)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        x = self.second(self.first(self.tokens(input_ids), attention_mask), attention_mask)
        return F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))


@pytest.mark.slow
def test_an_attention_that_hides_later_pads_only_runs_padded_when_pads_come_first() -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (4, 12, "left"), (3, 10, "right"), (4, 9, "holes"))
    check(Pair(HalfMasked().train()), given, {LATE_TOKENS: 2})


def windowed(width: int) -> Any:
    return lambda q, k, v, mask: attended(q, k, v, (distance(q).abs() < width) & keys(mask))


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 2])
def test_holes_under_a_window_run_padded(width: int) -> None:
    given = batches(masked_lm_batch, (4, 11, "right"), (4, 12, "left"), (4, 11, "holes"), (3, 10, "mixed"))
    check(Pair(Plain(windowed(width), layers=1).train()), given, {HOLES: 1})


@pytest.mark.slow
def test_a_window_wider_than_any_probe_is_not_trusted_beyond_it() -> None:
    """2,100 positions: the batches are short at first, then longer than what the mask was probed with."""
    pair = Pair(Plain(windowed(2100), places=2300, layers=1).train())
    given = batches(masked_lm_batch, (3, 12, "right"), (2, 2200, "right"))
    report = pair.train(given)
    expect_packed(report, steps=1, padded=1)


@pytest.mark.slow
def test_a_batch_of_one_row_first_then_larger_ones_and_back() -> None:
    pair = Pair(Plain(sdpa_bool, layers=1).train(), options=COMPILED)
    given = batches(
        masked_lm_batch,
        (1, 10, "none"),
        (4, 11, "right"),
        (1, 12, "none"),
        (3, 9, "mixed"),
        (1, 7, "none"),
        (6, 14, "left"),
    )
    for batch in given:
        if batch["input_ids"].shape[0] == 1:
            batch["attention_mask"][0, :3] = 0
            batch["labels"][0, :3] = IGNORED
            batch["labels"][0, 4:6] = 9
    report = pair.train(given)
    assert report.total("steps_packed") >= 3, describe(report)
    assert report.total("recompiles") <= 2, describe(report)


@pytest.mark.parametrize(
    "rows, positions", [(4, 4), pytest.param(8, 8, marks=pytest.mark.slow), (32, 32), (8, 4), (3, 32), (2, 96)]
)
def test_sizes_that_collide_with_each_other_and_with_the_models(rows: int, positions: int) -> None:
    """The first batch has as many rows as positions, heads, channels or words."""
    pair = Pair(Plain(sdpa_bool, places=96, layers=1).train(), options=COMPILED)
    given = batches(masked_lm_batch, (rows, positions, "right"), (5, 9, "left"), (9, 5, "right"))
    expect_packed(pair.train(given), steps=3)


@pytest.mark.slow
def test_forty_random_mixtures_compile_at_most_twice_more() -> None:
    pair = Pair(Plain(filled, layers=1).train(), options=COMPILED)
    draw = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        rows, positions = draw.choice([1, 2, 3, 4, 5, 8]), draw.randint(5, 40)
        mask = token_mask(rows, positions, draw.choice(["right", "left", "mixed", "holes", "one", "none"]), generator)
        ids = torch.randint(5, VOCAB, mask.shape, generator=generator)
        keep = (torch.rand(mask.shape, generator=generator) < 0.5) & (mask == 1)
        keep[0, 1:3] = True
        pair.step({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~keep, IGNORED)})
    report = LEDGER.report()
    assert report.total("recompiles") <= 2, describe(report)
    assert report.total("steps_packed") >= 20, describe(report)


def test_figures_of_the_report_are_those_of_the_batches_which_come_out_as_they_went_in() -> None:
    pair = Pair(Plain(sdpa_bool, layers=1).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"))
    for batch in given:
        before = {name: (value.clone(), value._version, set(vars(value))) for name, value in batch.items()}
        pair.step(batch)
        for name, (value, version, attributes) in before.items():
            assert torch.equal(batch[name], value)
            assert batch[name]._version == version
            assert set(vars(batch[name])) == attributes, f"marks were left on {name}"
    report = LEDGER.report()
    assert report.total("tokens_real") == sum(int(batch["attention_mask"].sum()) for batch in given)
    assert report.total("tokens_padded") == sum(batch["attention_mask"].numel() for batch in given)
    assert report.total("labels") == sum(int((batch["labels"] != IGNORED).sum()) for batch in given)
    assert 0 < report.total("host_seconds") < 1
    json = report.to_json()
    assert json["steps_packed"] == 2
    assert json["tokens_saved"] == report.total("tokens_padded") - report.total("tokens_real")


@pytest.mark.slow
def test_min_padding_sends_nearly_full_batches_to_the_padded_step() -> None:
    pair = Pair(Plain(sdpa_bool, layers=1).train(), options={"min_padding": 0.5})
    given = batches(masked_lm_batch, (4, 12, "one"), (4, 12, "none"))
    given[0]["attention_mask"][2, 1:] = 0
    given[0]["labels"][2, 1:] = IGNORED
    given[1]["attention_mask"][1, 8:] = 0
    given[1]["labels"][1, 8:] = IGNORED
    check(pair, given, {HARDLY_ANY: 1})
