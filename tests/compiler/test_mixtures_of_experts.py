"""Mixtures of experts of Hugging Face: routed tokens are packed, and trained as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

hf = pytest.importorskip("transformers", minversion="5.0")

from tests.compiler.parity import (  # noqa: E402
    COMPILED,
    Pair,
    batches,
    causal_batch,
    compare_at_tokens,
    expect_packed,
    mixture,
    padded_because,
)

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
LATENT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}  # fmt: skip


def qwen3(**kwargs: Any) -> Any:
    given = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, **kwargs}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **given))


def mixtral(**kwargs: Any) -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4, **kwargs))


def gpt_oss(**kwargs: Any) -> Any:
    layers = ["sliding_attention", "full_attention"]
    given = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, "layer_types": layers, **kwargs}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, **given))


def deepseek2(**kwargs: Any) -> Any:
    return hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**LATENT, **kwargs))


def deepseek3(**kwargs: Any) -> Any:
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT, n_group=2, topk_group=1, **kwargs))


def olmoe(**kwargs: Any) -> Any:
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, **kwargs))


def granite(**kwargs: Any) -> Any:
    return hf.GraniteMoeForCausalLM(hf.GraniteMoeConfig(**SMALL, num_local_experts=4, **kwargs))


def glm4(**kwargs: Any) -> Any:
    given = {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "head_dim": 8, **kwargs,
    }  # fmt: skip
    return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SMALL, **given))


def ernie(**kwargs: Any) -> Any:
    given = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1, **kwargs}
    return hf.Ernie4_5_MoeForCausalLM(hf.Ernie4_5_MoeConfig(**SMALL, **given))


def hunyuan() -> Any:
    """Of one expert, as its configuration has it by default: all entries are those of that expert."""
    return hf.HunYuanMoEV1ForCausalLM(hf.HunYuanMoEV1Config(**SMALL, head_dim=8))


def hunyuan_of_four() -> Any:
    return hf.HunYuanMoEV1ForCausalLM(hf.HunYuanMoEV1Config(**SMALL, head_dim=8, num_experts=4, moe_topk=2))


def inkling2() -> Any:
    """Sinks that each query has of its own, beside a bias that follows from the query; convolutions before keys."""
    given = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    config = pytest.importorskip("transformers.models.inkling2").Inkling2TextConfig(
        **given, unpadded_vocab_size=96, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=5, rel_extent=8, d_rel=4, layer_types=["hybrid_sliding", "hybrid"], n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, n_layers_per_attn_res_block=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return hf.Inkling2ForCausalLM(config)


# one of each kind in the default suite: latent attention with groups of experts; the others differ in parts of it
OTHERS = (mixtral, deepseek2, olmoe, granite, glm4, ernie, hunyuan, hunyuan_of_four)


@pytest.mark.parametrize("build", [deepseek3, *(pytest.param(build, marks=pytest.mark.slow) for build in OTHERS)])
def test_routed_tokens_are_packed(build: Callable[..., Any]) -> None:
    pair = Pair(build().train())
    report = pair.train(batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (3, 9, "holes")), compare_at_tokens())
    expect_packed(report, steps=3, padded=0)


@pytest.mark.slow
def test_sinks_of_queries_beside_a_bias_from_them() -> None:
    report = Pair(inkling2().train()).train(batches(causal_batch, *mixture()), compare_at_tokens())
    expect_packed(report, steps=4, padded=1)
    assert padded_because(report) == {"holes between the tokens of a row under a sliding window": 1}


def test_compiled_once_for_any_number_of_tokens() -> None:
    pair = Pair(qwen3().train(), options=COMPILED)
    report = pair.train(batches(causal_batch, *mixture()), compare_at_tokens())
    expect_packed(report, steps=5, padded=0)
    assert report.total("recompiles") == 0


def test_attention_sinks_and_windows() -> None:
    pair = Pair(gpt_oss().train(), options=COMPILED)
    report = pair.train(batches(causal_batch, *mixture()), compare_at_tokens())
    expect_packed(report, steps=4, padded=1)
    assert padded_because(report) == {"holes between the tokens of a row under a sliding window": 1}


@pytest.mark.slow
def test_experts_of_every_token_gathered() -> None:
    """`batched_mm`: each entry has a copy of its expert's weights."""
    pair = Pair(qwen3(experts_implementation="batched_mm").train())
    report = pair.train(batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (3, 9, "holes")), compare_at_tokens())
    expect_packed(report, steps=3, padded=0)


@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_router_losses(masked: bool) -> None:
    """With a mask they leave out pads; without one they see pads, so the model stays padded."""
    pair = Pair(mixtral(output_router_logits=True, router_aux_loss_coef=0.1).train())
    given = batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (3, 9, "right"))
    if not masked:
        given = [{name: value for name, value in batch.items() if name != "attention_mask"} for batch in given]
    report = pair.train(given)
    if masked:
        expect_packed(report, steps=3, padded=0)
