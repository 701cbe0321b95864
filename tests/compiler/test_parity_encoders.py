"""Encoders of Hugging Face, unchanged: masked language models, classifiers, taggers and readers train as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as hf

from tests.compiler.parity import (
    COMPILED,
    Batch,
    Pair,
    batches,
    compare_at_tokens,
    compare_whole,
    describe,
    expect_packed,
    masked_lm_batch,
    mixture,
)

SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# What a classifier that pools the first token is fed: the first token is one.
FIRST_IS_A_TOKEN = ((4, 11, "right"), (3, 13, "right"), (4, 8, "one"))


def bert(attention: str, **kwargs: Any) -> Any:
    return hf.BertConfig(attn_implementation=attention, max_position_embeddings=64, **SMALL, **STILL, **kwargs)


def roberta(attention: str, **kwargs: Any) -> Any:
    return hf.RobertaConfig(
        attn_implementation=attention, max_position_embeddings=64, pad_token_id=1, **SMALL, **STILL, **kwargs
    )


def distilbert(attention: str, **kwargs: Any) -> Any:
    return hf.DistilBertConfig(
        attn_implementation=attention, dim=48, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=96, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=64, **kwargs,
    )  # fmt: skip


def electra(attention: str, **kwargs: Any) -> Any:
    return hf.ElectraConfig(
        attn_implementation=attention, embedding_size=32, max_position_embeddings=64, **SMALL, **STILL, **kwargs
    )


def modernbert(attention: str) -> Any:
    return hf.ModernBertConfig(
        attn_implementation=attention, local_attention=8, global_attn_every_n_layers=2, pad_token_id=1, bos_token_id=2,
        eos_token_id=3, cls_token_id=2, sep_token_id=3, **SMALL,
    )  # fmt: skip


MASKED: dict[str, Any] = {
    "bert-sdpa": pytest.param(hf.BertForMaskedLM, bert, "sdpa", marks=pytest.mark.slow),
    "bert-eager": (hf.BertForMaskedLM, bert, "eager"),
    "roberta-sdpa": pytest.param(hf.RobertaForMaskedLM, roberta, "sdpa", marks=pytest.mark.matrix),
    "roberta-eager": pytest.param(hf.RobertaForMaskedLM, roberta, "eager", marks=pytest.mark.slow),
    "distilbert-sdpa": pytest.param(hf.DistilBertForMaskedLM, distilbert, "sdpa", marks=pytest.mark.slow),
    "electra-sdpa": pytest.param(hf.ElectraForMaskedLM, electra, "sdpa", marks=pytest.mark.slow),
}


@pytest.mark.parametrize("kind, config, attention", MASKED.values(), ids=MASKED.keys())
def test_masked_language_models_train_as_eager_does(kind: Any, config: Callable[..., Any], attention: str) -> None:
    pair = Pair(kind(config(attention)).train(), options=COMPILED)
    report = pair.train(batches(masked_lm_batch, *mixture()), compare_at_tokens())
    expect_packed(report, steps=5, padded=0)
    assert report.total("recompiles") == 0, describe(report)


@pytest.mark.slow
def test_windows_to_both_sides_in_some_layers() -> None:
    pair = Pair(hf.ModernBertForMaskedLM(modernbert("sdpa")).train())
    given = batches(masked_lm_batch, (4, 14, "right"), (3, 17, "left"), (4, 12, "holes"), (5, 20, "right"))
    report = pair.train(given, compare_at_tokens())
    expect_packed(report, steps=3, padded=1)


def with_classes(rows: int, positions: int, padding: str, generator: torch.Generator) -> Batch:
    batch = masked_lm_batch(rows, positions, padding, generator)
    return {**batch, "labels": torch.randint(0, 3, (rows,), generator=generator)}


CLASSIFIERS = {
    "bert-sdpa": (hf.BertForSequenceClassification, bert, "sdpa"),
    "bert-eager": pytest.param(hf.BertForSequenceClassification, bert, "eager", marks=pytest.mark.matrix),
    "roberta-sdpa": pytest.param(hf.RobertaForSequenceClassification, roberta, "sdpa", marks=pytest.mark.matrix),
    "distilbert-eager": (hf.DistilBertForSequenceClassification, distilbert, "eager"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, config, attention", CLASSIFIERS.values(), ids=CLASSIFIERS.keys())
def test_classifiers_that_pool_the_first_token_are_packed(
    kind: Any, config: Callable[..., Any], attention: str
) -> None:
    pair = Pair(kind(config(attention, num_labels=3)).train())
    expect_packed(pair.train(batches(with_classes, *FIRST_IS_A_TOKEN), compare_whole()), steps=3, padded=0)


@pytest.mark.slow
def test_regression_on_a_pooled_token() -> None:
    pair = Pair(hf.BertForSequenceClassification(bert("sdpa", num_labels=1)).train())
    given = batches(with_classes, *FIRST_IS_A_TOKEN)
    for batch in given:
        batch["labels"] = batch["labels"].float()
    expect_packed(pair.train(given, compare_whole()), steps=3)


@pytest.mark.slow
def test_token_types_are_followed() -> None:
    pair = Pair(hf.BertForMaskedLM(bert("sdpa")).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"), (4, 8, "holes"))
    for batch in given:
        positions = batch["input_ids"].shape[1]
        batch["token_type_ids"] = (
            (torch.arange(positions) >= positions // 2).long().expand_as(batch["input_ids"]).clone()
        )
    expect_packed(pair.train(given, compare_at_tokens()), steps=3)


@pytest.mark.slow
def test_pretraining_has_a_loss_on_tokens_and_one_on_the_pooled_token() -> None:
    pair = Pair(hf.BertForPreTraining(bert("sdpa")).train())
    given = batches(masked_lm_batch, *FIRST_IS_A_TOKEN)
    for batch in given:
        batch["next_sentence_label"] = torch.randint(0, 2, (batch["input_ids"].shape[0],))
    expect_packed(pair.train(given, compare_at_tokens("prediction_logits")), steps=3)


def test_a_bare_encoder_pooled_outside_with_the_mask() -> None:
    def call(model: Any, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        scores = torch.nn.functional.normalize(pooled, dim=-1)
        return torch.nn.functional.cross_entropy(scores @ scores.T * 5, labels)

    pair = Pair(hf.BertModel(bert("sdpa"), add_pooling_layer=False).train(), call=call)
    given = batches(with_classes, (4, 11, "right"), (4, 13, "left"), (4, 8, "holes"))
    expect_packed(pair.train(given), steps=3)
