"""Masks whose meaning probes cannot settle are compared in each step: what a batch adds to the meaning is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepytorch.passes.unpad.mask_checks import mask_differs
from tests.compiler.parity import IGNORED, Batch, Pair, batches, causal_batch, expect_packed, padded_because
from tests.compiler.plain_models import HEADS, VOCAB, Plain, attended

SIZES = ((4, 11, "right"), (3, 13, "right"), (4, 16, "right"))
TOLD = "a mask that says more about this batch than which keys are tokens"


class Masked(Plain):
    """A decoder whose mask (rows, queries, keys) is made of all that the model is given."""

    def __init__(self, more: Callable[..., torch.Tensor]) -> None:
        super().__init__(lambda q, k, v, mask: attended(q, k, v, mask[:, None]))
        self.more = more

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        places = torch.arange(input_ids.shape[1])
        distance = places[:, None] - places
        mask = self.more(distance, input_ids, attention_mask, labels) & attention_mask[:, None].bool()
        return super().forward(input_ids, mask, labels)


def prompts_see_each_other(distance: Any, ids: Any, mask: Any, labels: Any) -> torch.Tensor:
    prompt = labels == IGNORED
    return (distance >= 0) | (prompt[:, :, None] & prompt[:, None])


def images_see_each_other(distance: Any, ids: Any, mask: Any, labels: Any) -> torch.Tensor:
    image = ids > VOCAB - 4
    return (distance >= 0) | (image[:, :, None] & image[:, None])


def thousands_see_each_other(distance: Any, ids: Any, mask: Any, labels: Any) -> torch.Tensor:
    image = ids // 8 == 4
    return (distance >= 0) | (image[:, :, None] & image[:, None])


def long_rows_have_a_window(distance: Any, ids: Any, mask: Any, labels: Any) -> torch.Tensor:
    return (distance >= 0) & ((distance < 4) | (mask.sum(1)[:, None, None] <= 12))


def with_prompts(given: list[Batch]) -> list[Batch]:
    for batch in given:
        half = batch["attention_mask"].sum(1, keepdim=True) // 2
        batch["labels"] = batch["labels"].masked_fill(torch.arange(batch["labels"].shape[1]) < half, IGNORED)
    return given


def with_images(given: list[Batch]) -> list[Batch]:
    for batch in given:
        batch["input_ids"][:, 1:3] = 34  # 34 // 8 is 4
        batch["input_ids"][:, 3:5] = VOCAB - 2
    return given


@pytest.mark.parametrize(
    "more, given",
    [
        (prompts_see_each_other, with_prompts),
        (images_see_each_other, with_images),
        (thousands_see_each_other, with_images),
    ],
)
def test_tokens_that_see_each_other_train_as_in_eager(more: Any, given: Any) -> None:
    Pair(Masked(more).train()).train(given(batches(causal_batch, *SIZES)))


def test_a_batch_without_images_is_packed_and_one_with_them_is_not() -> None:
    pair = Pair(Masked(images_see_each_other).train())
    without = batches(causal_batch, *SIZES)
    for batch in without:
        batch["input_ids"] = batch["input_ids"].clamp(max=VOCAB - 5)
    report = pair.train([*without, *with_images(batches(causal_batch, *SIZES))])
    assert padded_because(report) == {TOLD: 3}
    expect_packed(report, steps=3, padded=3)


def test_rows_past_a_length_have_another_mask() -> None:
    report = Pair(Masked(long_rows_have_a_window).train()).train(batches(causal_batch, *SIZES))
    assert padded_because(report) == {TOLD: 2}  # of 13 and of 16 positions
    expect_packed(report, steps=1, padded=2)


def test_attentions_that_read_other_tokens_are_told_apart() -> None:
    """Ids whose third is 4 modulo 7, of which no probe knows, are hidden from the second layer alone."""

    class Two(Plain):
        def __init__(self) -> None:
            super().__init__(lambda q, k, v, mask: attended(q, k, v, mask[:, None, None].bool()))

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            x = self.tokens(input_ids)
            rare = input_ids // 3 % 7 == 4
            for block, mask in zip(self.blocks, (attention_mask, attention_mask.bool() & ~rare), strict=True):
                x = block(x, mask)
            return self.loss(self, self.norm(x), attention_mask, labels)

    given = batches(causal_batch, *SIZES)
    for batch in given:
        batch["input_ids"][:, 1:3] = 34
    Pair(Two().train()).train(given)


# ------------------------------------------------------------------------------------------ the comparison by itself

TOKENS = torch.tensor([[True, True, True, False], [True, True, False, False]])
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
SEEN = (CAUSAL & TOKENS[:, None])[:, None]


def differs(*terms: tuple[torch.Tensor, str], window: tuple[int, int] = (-1, 0), ndim: int = 4) -> list[bool]:
    kinds = [(kind, ndim) for _, kind in terms]
    return mask_differs([value for value, _ in terms], kinds, TOKENS, window, same_space=True).tolist()


def test_each_kind_of_term_is_compared() -> None:
    low = torch.zeros(2, 1, 4, 4).masked_fill(~SEEN, -1e9)
    assert differs((SEEN, "visible")) == [False, False]
    assert differs((~SEEN, "hidden")) == [False, False]
    assert differs((low, "added")) == [False, False]
    assert differs((TOKENS[:, None, None], "visible"), (CAUSAL, "visible")) == [False, False]
    assert differs((low, "added"), (SEEN.float(), "factor")) == [False, False]
    assert differs((SEEN.repeat_interleave(HEADS, 0)[:, 0], "visible"), ndim=3) == [False, False]


def test_a_row_that_differs_is_named() -> None:
    more = SEEN.clone()
    more[1, 0, 0, 1] = True  # the first query of the second row sees the second key
    assert differs((more, "visible")) == [False, True]
    assert differs((SEEN, "visible"), window=(1, 0)) == [True, False]  # the first row has a third query
    assert differs((SEEN, "visible"), window=(-1, -1)) == [True, True]
    assert differs((torch.zeros(2, 1, 4, 4).masked_fill(~SEEN, torch.nan), "added")) == [True, True]
    assert differs((SEEN, "visible"), (SEEN.float() * 0.5, "factor")) == [True, True]
    one_head = SEEN.expand(2, HEADS, 4, 4).clone()
    one_head[0, 1, 2, 0] = False
    assert differs((one_head, "visible")) == [True, False]


def test_what_a_query_that_is_no_token_sees_does_not_count() -> None:
    more = SEEN.clone()
    more[:, :, 3] = True
    assert differs((more, "visible")) == [False, False]
