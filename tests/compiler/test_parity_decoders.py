"""Decoders of Hugging Face, unchanged: compiled training equals eager training, whatever the padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as hf

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    COMPILED,
    IGNORED,
    Pair,
    assert_same_gradients,
    batches,
    causal_batch,
    compare_at_tokens,
    compare_whole,
    describe,
    expect_packed,
    mixture,
    padded_because,
)

SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama(attention: str, **kwargs: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(attn_implementation=attention, **{**GROUPED, **kwargs}))


def qwen2(attention: str) -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(attn_implementation=attention, **GROUPED))


def qwen3(attention: str) -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(attn_implementation=attention, head_dim=16, **GROUPED))


def gpt2(attention: str) -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=96, attn_implementation=attention, **NO_DROPOUT)
    )


def gpt_neox(attention: str) -> Any:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(attn_implementation=attention, **SMALL))


def phi(attention: str) -> Any:
    return hf.PhiForCausalLM(hf.PhiConfig(attn_implementation=attention, **GROUPED))


def opt(attention: str) -> Any:
    if "self.layerdrop >" not in inspect.getsource(hf.models.opt.modeling_opt.OPTDecoder.forward):
        pytest.skip("this transformers draws a number before each layer of OPT, which cuts its graph")
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            hidden_size=48, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
            word_embed_proj_dim=48, dropout=0.0, attn_implementation=attention,
        )
    )  # fmt: skip


def mistral(attention: str) -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(sliding_window=4, attn_implementation=attention, **GROUPED))


def gemma2(attention: str) -> Any:
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(sliding_window=4, head_dim=16, attn_implementation=attention, **GROUPED)
    )


def qwen2_windows_in_some_layers(attention: str) -> Any:
    return hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            use_sliding_window=True, sliding_window=4, max_window_layers=1, attn_implementation=attention, **GROUPED
        )
    )


WHOLE: dict[str, Any] = {
    "llama-sdpa": (llama, "sdpa"),
    "llama-eager": pytest.param(llama, "eager", marks=pytest.mark.slow),
    "qwen2-sdpa": pytest.param(qwen2, "sdpa", marks=pytest.mark.matrix),
    "qwen2-eager": pytest.param(qwen2, "eager", marks=pytest.mark.slow),
    "qwen3-sdpa": pytest.param(qwen3, "sdpa", marks=pytest.mark.slow),
    "gpt2-sdpa": pytest.param(gpt2, "sdpa", marks=pytest.mark.matrix),
    "gpt2-eager": pytest.param(gpt2, "eager", marks=pytest.mark.slow),  # at model entry in the default suite
    "gpt_neox-sdpa": pytest.param(gpt_neox, "sdpa", marks=pytest.mark.slow),
    "phi-eager": pytest.param(phi, "eager", marks=pytest.mark.matrix),  # rotates in part, as gpt_neox does
    "opt-sdpa": pytest.param(opt, "sdpa", marks=pytest.mark.matrix),
    "opt-eager": pytest.param(opt, "eager", marks=pytest.mark.slow),
}
WINDOWED = {
    "mistral-sdpa": pytest.param(mistral, "sdpa", marks=pytest.mark.matrix),
    "mistral-eager": (mistral, "eager"),
    "gemma2-eager": pytest.param(gemma2, "eager", marks=pytest.mark.slow),
    "qwen2-sdpa": pytest.param(qwen2_windows_in_some_layers, "sdpa", marks=pytest.mark.slow),
}


@pytest.mark.parametrize("build, attention", WHOLE.values(), ids=WHOLE.keys())
def test_training_equals_eager_for_every_padding(build: Callable[[str], Any], attention: str) -> None:
    pair = Pair(build(attention).train(), options=COMPILED)
    report = pair.train(batches(causal_batch, *mixture()), compare_at_tokens())
    expect_packed(report, steps=5, padded=0)
    assert report.total("recompiles") == 0, describe(report)


@pytest.mark.parametrize("build, attention", WINDOWED.values(), ids=WINDOWED.keys())
def test_sliding_windows_are_packed_and_holes_run_padded(build: Callable[[str], Any], attention: str) -> None:
    pair = Pair(build(attention).train(), options=COMPILED)  # whose graph returns a size twice
    report = pair.train(batches(causal_batch, *mixture()))
    expect_packed(report, steps=4, padded=1)
    assert padded_because(report) == {"holes between the tokens of a row under a sliding window": 1}


@pytest.mark.slow
@pytest.mark.parametrize("build, attention", WINDOWED.values(), ids=WINDOWED.keys())
def test_logits_of_a_windowed_model_are_those_of_eager(build: Callable[[str], Any], attention: str) -> None:
    model = build(attention).train()
    model.config.use_cache = False
    pair = Pair(model)
    report = pair.train(batches(causal_batch, (4, 11, "right"), (3, 13, "left"), (4, 9, "one")), compare_at_tokens())
    expect_packed(report, steps=3)


@pytest.mark.slow
def test_a_window_kept_in_a_buffer_is_found_wider_than_the_first_batch() -> None:
    config = hf.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=12,
        vocab_size=96, max_position_embeddings=64, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    pair = Pair(hf.GPTNeoForCausalLM(config).train())
    pair.train(batches(causal_batch, (4, 10, "right"), (3, 40, "right"), (4, 33, "left")))


def test_prompts_without_labels_run_neither_head_nor_loss_and_nothing_changes() -> None:
    pair = Pair(llama("sdpa").train())
    given = batches(causal_batch, (4, 14, "right"), (3, 11, "left"), (5, 16, "right"), prompt=6)
    report = pair.train(given, compare_at_tokens())
    expect_packed(report, steps=3)
    expected = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in given)
    assert report.total("labels") == expected
    assert any("labelled tokens only" in change for region in report.regions for change in region.changes)


@pytest.mark.slow
def test_inductor_trains_as_eager_does() -> None:
    pair = Pair(llama("sdpa").train(), options={"lowering": "inductor"})
    given = batches(causal_batch, (4, 11, "right"), (3, 13, "left"), (5, 9, "mixed"))
    report = pair.train(given, compare_at_tokens())
    expect_packed(report, steps=3, padded=0)
    assert report.total("recompiles") == 0, describe(report)


@pytest.mark.slow
def test_loss_scaled_by_the_batches_of_an_accumulation() -> None:
    pair = Pair(llama("sdpa").train())
    for batch in batches(causal_batch, (4, 11, "right"), (3, 13, "left")):
        pair.step({**batch, "num_items_in_batch": torch.tensor(57)}, compare_at_tokens())
    expect_packed(LEDGER.report(), steps=2)


@pytest.mark.slow
def test_gradients_accumulate_over_packed_and_padded_steps() -> None:
    pair = Pair(llama("sdpa").train())
    given = batches(causal_batch, (4, 11, "right"), (2, 9, "none"), (3, 13, "left"))
    given[2]["labels"] = given[2]["input_ids"].clone()  # labels at pads: this one runs padded
    for batch in given:
        for model in (pair.reference, pair.compiled):
            model(**batch).loss.backward()
    assert_same_gradients(pair.reference, pair.model)
    expect_packed(LEDGER.report(), steps=2, padded=1)


@pytest.mark.slow
def test_positions_counted_from_the_mask_are_followed() -> None:
    pair = Pair(llama("eager").train())
    given = batches(causal_batch, (4, 11, "left"), (3, 13, "mixed"), (4, 9, "holes"))
    for batch in given:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expect_packed(pair.train(given, compare_at_tokens()), steps=3)


@pytest.mark.slow
def test_sequence_classification_reads_the_last_token() -> None:
    config = hf.LlamaConfig(num_labels=3, pad_token_id=1, attn_implementation="sdpa", **GROUPED)
    pair = Pair(hf.LlamaForSequenceClassification(config).train())
    given = batches(causal_batch, (4, 11, "right"), (3, 13, "left"), (5, 9, "right"), (1, 9, "left"))
    for batch in given:
        batch["labels"] = torch.randint(0, 3, (batch["input_ids"].shape[0],))
    expect_packed(pair.train(given, compare_whole()), steps=3)


@pytest.mark.slow
def test_without_a_mask_positions_that_no_label_needs_are_left_out() -> None:
    pair = Pair(llama("sdpa").train())
    given = batches(causal_batch, (4, 16, "right"), (3, 18, "right"), (5, 12, "right"))
    for batch in given:
        del batch["attention_mask"]
    report = pair.train(given)
    expect_packed(report, steps=3)
