"""Hugging Face models with random weights, made from their configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepytorch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deepytorch.data.batching import Kind


@dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a model. An encoder-decoder splits the layers between its two sides.

    num_key_value_heads: of families whose queries share keys; None: a quarter of the heads.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None


SIZES = {
    "tiny": Size(num_layers=2, hidden_size=64, num_heads=4, intermediate_size=128),  # for tests
    "quarter": Size(num_layers=12, hidden_size=192, num_heads=3, intermediate_size=768),  # base, but a quarter as wide
    "demo": Size(num_layers=4, hidden_size=256, num_heads=4, intermediate_size=704),
    "small": Size(num_layers=4, hidden_size=512, num_heads=8, intermediate_size=1376),
    "base": Size(num_layers=12, hidden_size=768, num_heads=12, intermediate_size=3072),  # as the first GPT-2 and BERT
    "large": Size(num_layers=16, hidden_size=2048, num_heads=16, intermediate_size=8192),  # about a billion weights
}

MAX_POSITIONS = 1024  # of learned position tables; longer rows are cut to it


def batch_kind(name: str) -> Kind:
    """Return the layout of batches (see `deepytorch.data.batches`) that the model `name` learns from."""
    return _family(name).kind


def build_model(
    name: str,
    size: str | Size = "small",
    *,
    vocab_size: int,
    attn_implementation: str = "sdpa",
    dropout: float | None = 0.0,
    seed: int = 0,
) -> PreTrainedModel:
    """Return the model `name` (one of `MODELS`) in fp32 on the CPU, in training mode, with weights drawn from `seed`.

    `dropout` replaces every dropout probability of the family's own configuration; None keeps them (0.1 for gpt2, bert,
    bart and t5). It is 0 unless asked for, because packed and padded steps draw different dropout masks, so that their
    losses cannot be compared. `use_cache` is off, as Trainer sets it. The special ids are those of `deepytorch.data`.
    Raises `ConfigError` for an unknown name or size.
    """
    import torch  # names of models, which options need, load no torch

    family = _family(name)
    if isinstance(size, str) and size not in SIZES:
        raise ConfigError(f'The model size is "{size}", expected one of {", ".join(SIZES)}.')
    transformers = _transformers()
    settings = (
        family.settings(SIZES[size] if isinstance(size, str) else size)
        | _special_ids(family)
        | {"vocab_size": vocab_size, "use_cache": False}
    )
    config = getattr(transformers, family.config_name)(**settings)
    if dropout is not None:
        for field in family.dropout_fields:
            setattr(config, field, dropout)
    config._attn_implementation = family.only if family.only and attn_implementation == "sdpa" else attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model_name)(config)
    return model.train()


@dataclass(frozen=True, slots=True)
class _Family:
    """The spelling of the configuration in one family of models."""

    config_name: str
    model_name: str
    kind: Kind
    settings: Callable[[Size], dict[str, Any]]
    dropout_fields: tuple[str, ...]
    only: str = ""  # the one implementation that the family has in place of sdpa for any dtype


def _llama(size: Size) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.num_layers,
        "hidden_size": size.hidden_size,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.intermediate_size,
        "max_position_embeddings": 2 * MAX_POSITIONS,
    }


def _llama_heads(size: Size) -> dict[str, Any]:
    head_dim = size.hidden_size // size.num_heads
    return _llama(size) | {"num_key_value_heads": size.num_heads, "head_dim": head_dim}


def _qwen2(size: Size) -> dict[str, Any]:
    grouped = size.num_key_value_heads or max(1, size.num_heads // 4)  # as in the published checkpoints
    return _llama(size) | {"num_key_value_heads": grouped}


def _qwen3_moe(size: Size) -> dict[str, Any]:
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": size.intermediate_size // 4}
    return _qwen2(size) | experts | {"head_dim": size.hidden_size // size.num_heads}


def _gpt_oss(size: Size) -> dict[str, Any]:
    """Every second layer has a window of 128 tokens; published checkpoints have 4 experts a token as well."""
    experts = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": size.intermediate_size // 4}
    return _qwen2(size) | experts | {"head_dim": size.hidden_size // size.num_heads, "sliding_window": 128}


def _gpt2(size: Size) -> dict[str, Any]:
    return {
        "n_layer": size.num_layers,
        "n_embd": size.hidden_size,
        "n_head": size.num_heads,
        "n_positions": MAX_POSITIONS,
    }


def _bert(size: Size) -> dict[str, Any]:
    return _llama(size) | {"intermediate_size": 4 * size.hidden_size, "max_position_embeddings": MAX_POSITIONS}


def _bart(size: Size) -> dict[str, Any]:
    sides = {}
    for side in ("encoder", "decoder"):
        sides[f"{side}_layers"] = size.num_layers // 2
        sides[f"{side}_attention_heads"] = size.num_heads
        sides[f"{side}_ffn_dim"] = 4 * size.hidden_size
    return sides | {"d_model": size.hidden_size, "max_position_embeddings": MAX_POSITIONS}


def _t5(size: Size) -> dict[str, Any]:
    return {
        "num_layers": size.num_layers // 2,
        "num_decoder_layers": size.num_layers // 2,
        "d_model": size.hidden_size,
        "d_ff": 4 * size.hidden_size,
        "num_heads": size.num_heads,
        "d_kv": size.hidden_size // size.num_heads,
    }


_FAMILIES = {
    "llama": _Family("LlamaConfig", "LlamaForCausalLM", "causal", _llama_heads, ("attention_dropout",)),
    "qwen2": _Family("Qwen2Config", "Qwen2ForCausalLM", "causal", _qwen2, ("attention_dropout",)),
    "qwen3_moe": _Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", "causal", _qwen3_moe, ("attention_dropout",)),
    "gpt_oss": _Family("GptOssConfig", "GptOssForCausalLM", "causal", _gpt_oss, ("attention_dropout",), only="eager"),
    "gpt2": _Family("GPT2Config", "GPT2LMHeadModel", "causal", _gpt2, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "bert": _Family(
        "BertConfig", "BertForMaskedLM", "masked", _bert, ("hidden_dropout_prob", "attention_probs_dropout_prob")
    ),
    "bart": _Family(
        "BartConfig",
        "BartForConditionalGeneration",
        "seq2seq",
        _bart,
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    "t5": _Family("T5Config", "T5ForConditionalGeneration", "seq2seq", _t5, ("dropout_rate",)),
}

MODELS = tuple(_FAMILIES)


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise ConfigError(f'The model is "{name}", expected one of {", ".join(MODELS)}.')
    return _FAMILIES[name]


def _special_ids(family: _Family) -> dict[str, int]:
    from deepytorch.data import BOS_ID, EOS_ID, PAD_ID

    ids = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return ids | {"decoder_start_token_id": BOS_ID} if family.kind == "seq2seq" else ids


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "transformers is not installed, and the models come from it. Install it with: pip install 'deepytorch[hf]'"
        ) from error
    transformers.logging.set_verbosity_error()  # keeps its advice about configurations out of tables
    return transformers
