"""Small configurations of any family of transformers: its own defaults, with every size that is known made small.

Only sizes are handed to the configuration's class, which derives what follows from them (the kinds of layers, the
width of a head) as it does for a user. `_OF_FAMILY` has what families need besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

HIDDEN, HEADS, HEAD_DIM, FEED_FORWARD, LAYERS, VOCABULARY, POSITIONS, WINDOW = 64, 4, 16, 128, 2, 128, 128, 16
FIRST_SPECIAL = 100  # ids from here on are those of images and the like, which no batch has


def _each(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


_SIZES = {
    **_each(
        HIDDEN,
        "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim output_embedding_size lru_width "
        "attention_hidden_size cross_attention_hidden_size prediction_head_size hidden_size_global d_latents "
        "out_hidden_size output_dim projector_input_dim projector_output_dim backbone_hidden_size embed_dim",
    ),
    **_each(32, "input_embedding_size hidden_size_per_layer_input pronunciation_embed_dim shape_embed_dim "
            "entity_emb_size q_lora_rank moe_intermediate_size shared_expert_intermediate_size "
            "shared_intermediate_size expert_ffn_hidden_size router_hidden_size embedding_rank o_lora_rank"),
    **_each(
        FEED_FORWARD,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dim_ff dff hidden_dim ffn_hidden_size d_inner "
        "feed_forward_size dense_intermediate_size mamba_intermediate_size mlp_dim mamba_d_ssm",
    ),
    **_each(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_blocks n_input_layers n_recurrent_layers n_output_layers num_layers_per_stack "
        "l_layers x_layers r_layers conf_num_hidden_layers num_self_attends_per_block num_sparse_encoder_layers "
        "num_sparse_decoder_layers max_window_layers",
    ),
    **_each(
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads num_cross_attention_heads "
        "index_n_heads linear_num_value_heads linear_num_heads swa_num_attention_heads conf_num_attention_heads "
        "num_experts n_routed_experts num_local_experts moe_num_experts",
    ),
    **_each(
        HEAD_DIM,
        "head_dim d_kv d_head dim_head attention_head_dim attention_head_size kv_channels qk_nope_head_dim v_head_dim "
        "kv_lora_rank index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim "
        "swa_v_head_dim mamba_d_head mamba_head_dim mamba_headdim global_head_dim rotary_dim adapter_rank "
        "loop_gate_rank gated_norm_rank mamba_chunk_size chunk_size xpath_unit_hidden_size hash_code_len d_rel",
    ),
    **_each(24, "qk_head_dim"),
    **_each(8, "qk_rope_head_dim state_size mamba_d_state ssm_state_size mamba_n_heads mamba_num_heads "
            "n_mamba_heads num_landmarks num_latents"),
    **_each(4, "time_step_rank zero_expert_num adapter_reduction_factor"),
    **_each(2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k linear_num_key_heads "
            "swa_num_key_value_heads num_query_groups num_key_value_groups"),
    **_each(1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
            "first_k_dense_replace num_dense_layers n_groups mamba_n_groups mamba_ngroups o_groups "
            "num_nextn_predict_layers moe_layer_start_index num_kv_shared_layers"),
    **_each(VOCABULARY, "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input "
            "pronunciation_vocab_size shape_vocab_size entity_vocab_size encoder_hash_byte_group_vocab "
            "unit_hifi_gan_vocab_size t2u_vocab_size char_vocab_size audio_vocab_size codebook_size"),
    **_each(POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
            "seq_length max_encoder_position_embeddings max_decoder_position_embeddings model_max_length"),
    **_each(WINDOW, "sliding_window sliding_window_size window_size local_attention attention_window_size "
            "attention_window local_attention_window_len"),
}  # fmt: skip

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_global_key_value_heads")

_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3,
    "attention_hidden_size": 2 * HIDDEN,
}

# What a family's sizes have to be for each other, or needs a value that its defaults do not have.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # by default neither has the attention that its published models have
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dory": {"num_hidden_layers": 6},
    "esm": {"vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "mistral4": {"qk_nope_head_dim": 8},
    "nemotron": {"num_key_value_heads": HEADS},
    "nystromformer": {"num_landmarks": 64},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "attention_head_dim": 2 * HIDDEN // HEADS},
    "zamba2": _ZAMBA,
}


def small_config(config_class: Any, family: str = "") -> Any:
    """Return a small configuration of a class, with ids of the special tokens and without dropout or cache.

    Raises what the class raises for sizes that it does not accept.
    """
    try:
        default = config_class()
    except Exception:
        default = config_class(**_OF_FAMILY.get(config_class.model_type, {}))
    config = config_class(**_small(default))
    kinds = _kinds_of_layers(default)
    if len(kinds) > 1 and set(kinds) != set(_kinds_of_layers(config)):
        config = config_class(**_small(default) | _layers(default, kinds))
    _set_rest(config)
    return config


def _small(default: Any) -> dict[str, Any]:
    """Return the arguments of a small configuration."""
    found: dict[str, Any] = {}
    values = vars(default)
    names = dict(getattr(default, "attribute_map", {}))
    fields = getattr(type(default), "__dataclass_fields__", values)  # the others are derived from these
    given = {name: value for name, value in values.items() if name not in names and name in fields}
    for name, value in given.items():
        if isinstance(value, bool):
            continue
        if name in _SIZES and isinstance(value, int) and value > 0:
            found[name] = min(value, _SIZES[name])
        elif name in _SIZES and isinstance(value, list | tuple) and value and isinstance(value[0], int):
            found[name] = _SIZES[name]
        elif name in _KEY_VALUE_HEADS and isinstance(value, int):
            found[name] = HEADS // 2 if value != _heads(default) else HEADS
            if value == 1:
                found[name] = 1
    found |= dict(_special_ids(given.items()))
    for name in getattr(default, "sub_configs", {}) or {}:
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            found[name] = small_config(type(part)).to_dict()
    return found | _OF_FAMILY.get(type(default).model_type, {})


def _heads(config: Any) -> int | None:
    for name in ("num_attention_heads", "n_heads", "num_heads", "n_head"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return None


def _special_ids(values: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, int]]:
    """Yield ids below the small vocabulary: those that are, stay; of texts 0, 1 and 2; the others from the end on."""
    last = VOCABULARY
    for name, value in values:
        if not name.endswith(("_token_id", "_token_index")):
            continue
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, int) and first >= FIRST_SPECIAL:
            of_text = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
            last -= name not in of_text
            yield name, of_text.get(name, last)
        elif isinstance(value, list | tuple) and value:
            yield name, first


def _kinds_of_layers(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(dict.fromkeys(kinds)) if isinstance(kinds, list | tuple) else []


def _layers(default: Any, kinds: list[str]) -> dict[str, Any]:
    """Return the arguments that give each kind of layer: once, or as many layers of the default as hold them all."""
    if isinstance(getattr(type(default), "layer_types", None), property) or "layer_types" not in vars(default):
        return {"num_hidden_layers": 1 + max(map(default.layer_types.index, kinds))}
    return {"num_hidden_layers": len(kinds), "layer_types": kinds}


def _set_rest(config: Any) -> None:
    """Set what no class derives anything from: no dropout, no cache, a pad, what a decoder starts with."""
    for name, value in list(vars(config).items()):
        is_dropout = "drop" in name or name in ("router_jitter_noise", "input_jitter_noise")
        if is_dropout and isinstance(value, float) and not isinstance(value, bool):
            with contextlib.suppress(Exception):
                setattr(config, name, 0.0)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _set_rest(value)
    wanted: dict[str, Any] = {"use_cache": False}
    wanted |= {"pad_token_id": 0} if getattr(config, "pad_token_id", None) is None else {}
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        wanted["decoder_start_token_id"] = 1
    for name, given in wanted.items():
        with contextlib.suppress(Exception):
            setattr(config, name, given)
