"""Every family is built small, random, the same for a seed, and learns from its own layout of batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepytorch.bench.models import MODELS, batch_kind, build_model
from deepytorch.data import BOS_ID, PAD_ID, Row, batches, train_tokenizer
from deepytorch.errors import ConfigError

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def drawn():
    rows = [Row("Say it. " * count, "", "one " * 3 * count) for count in (1, 9, 4)]
    tokenizer = train_tokenizer(rows, VOCAB_SIZE)
    kinds = ("causal", "masked", "seq2seq")
    return {kind: next(batches(rows, tokenizer, batch_size=3, max_length=512, kind=kind)) for kind in kinds}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient_and_pads_make_no_difference(name, drawn):
    batch = drawn[batch_kind(name)]
    model = build_model(name, "tiny", vocab_size=VOCAB_SIZE)
    loss = model(**batch).loss
    loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    mask = batch["attention_mask"].bool()
    other = batch | {"input_ids": batch["input_ids"].masked_fill(~mask, 77)}
    assert not mask.all()
    torch.testing.assert_close(model(**other).loss, loss)


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone(name):
    first, again, other = (_flat(build_model(name, "tiny", vocab_size=VOCAB_SIZE, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_random_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build_model("llama", "tiny", vocab_size=VOCAB_SIZE)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_off_unless_the_family_s_own_is_asked_for(name, drawn):
    batch = drawn[batch_kind(name)]
    model = build_model(name, "tiny", vocab_size=VOCAB_SIZE)
    assert model.training
    torch.testing.assert_close(model(**batch).loss, model(**batch).loss, rtol=0, atol=0)
    default = build_model(name, "tiny", vocab_size=VOCAB_SIZE, dropout=None)
    has_dropout = name not in ("llama", "qwen2", "qwen3_moe", "gpt_oss")  # theirs is 0 by default
    assert (default(**batch).loss != default(**batch).loss).item() is has_dropout


def test_the_small_llama_is_the_one_that_results_are_stated_for():
    config = build_model("llama", vocab_size=8192).config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (4, 512, 1376)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (8, 8, 8192)
    assert (config.pad_token_id, config.bos_token_id) == (PAD_ID, BOS_ID)


def test_qwen2_has_grouped_queries():
    config = build_model("qwen2", "tiny", vocab_size=VOCAB_SIZE).config
    assert config.num_attention_heads == 4 * config.num_key_value_heads


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r'The model is "lama", expected one of llama, '):
        build_model("lama", vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r'The model size is "huge", expected one of tiny, '):
        build_model("llama", "huge", vocab_size=VOCAB_SIZE)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
