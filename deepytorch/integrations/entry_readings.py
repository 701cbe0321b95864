"""The readings of a batch that a Hugging Face model's configuration allows; `entry_proof` tries them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from deepytorch.integrations.packed_attention import (
    IN_GRAPHS,
    OPAQUE,
    asks_for_every_attention,
    has_learned_bias,
    implementations,
)
from deepytorch.integrations.packed_batch import Reading, RowKind, columns, counts, ids_counted
from deepytorch.library_code import is_of_libraries
from deepytorch.torch_internals import BatchNorm

# Heads that look at whole rows and not at their tokens: only the model below them is packed.
BY_ROW = ("ForSequenceClassification", "ForNextSentencePrediction")
AMONG_POSITIONS = ("ForQuestionAnswering", "ForMultipleChoice")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # position embeddings that depend on the padded row's length
LAYER_TYPES = ("full_attention", "sliding_attention")
SHORTEST = 12  # positions of the probe


def declined_beforehand(outer: nn.Module, model: Any) -> str | None:
    """Return why a model is declined for a property that a small probe would not show; None if there is none."""
    config = _text_config(model)
    biased = any(has_learned_bias(module) for module in model.modules())
    if not (getattr(model, "_supports_flash_attn", False) or biased):
        return f"{type(model).__name__} does not say what its masks mean (transformers gives it no FlashAttention)"
    own = biased or getattr(model.config, "_attn_implementation", None) == "eager"
    if own and not asks_for_every_attention(import_module("transformers.modeling_utils")):
        return "attention of the model's own, which transformers gives no way into before version 5 (eager, T5's)"
    strange = implementations(model) - {*IN_GRAPHS, *OPAQUE}
    if strange:
        return f"attention by {', '.join(sorted(map(str, strange)))}, of which only its author knows what it sees"
    if type(model).__name__.endswith(AMONG_POSITIONS):
        return "a head that chooses among positions, pads among them, or among rows"
    if getattr(config, "expert_capacity", None) is not None:
        return "experts that take so many tokens of each row"
    if (getattr(config, "max_position_embeddings", None) or SHORTEST) < SHORTEST:
        return f"fewer than {SHORTEST} positions"
    if getattr(model.config, "output_attentions", False):
        return "attention weights are asked for"
    if _routers_are_asked(model):
        return (
            "the configuration sets output_router_logits, and the routers' loss reads the mask of each position, "
            "which a packed row does not have"
        )
    for module in model.modules():
        if isinstance(module, BatchNorm):
            return "batch normalisation, whose statistics count pads"
        if getattr(getattr(module, "state", None), "threshold", 0.0):  # bitsandbytes' LLM.int8()
            return "8-bit layers that compute the columns with an outlier in any token, or pad, otherwise"
    layers = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if layers:
        return f"layers of type {', '.join(sorted(layers))}"
    for name in ("rope_parameters", "rope_scaling"):
        kinds = getattr(config, name, None) or {}
        found = {kinds.get("rope_type")} | {each.get("rope_type") for each in kinds.values() if isinstance(each, dict)}
        if found & set(LENGTH_DEPENDENT_ROPE):
            return f"position embeddings that depend on the padded length ({', '.join(map(str, found))})"
    adapters = getattr(outer, "peft_config", None) or {}
    if any(getattr(each, "is_prompt_learning", False) for each in adapters.values()):
        return "virtual tokens of a learned prompt"
    if not is_of_libraries(outer):
        return "modules or functions of the script's own, which may join tokens further apart than a probe's rows reach"
    return None


def _routers_are_asked(model: Any) -> bool:
    """Return whether the model's configuration asks for its routers' logits, and with them for the routers' loss.

    That loss multiplies each position's entries by its mask, and a packed row has no such mask.
    """
    return any(getattr(each, "output_router_logits", False) for each in (model.config, _text_config(model)))


def _text_config(model: Any) -> Any:
    """Return the configuration of the language model."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _num_ids(model: Any) -> int:
    """Return the number of tokens that a model has embeddings of. PEFT puts modules of its own around these."""
    inside = model.get_input_embeddings().modules()
    found = (getattr(each, "num_embeddings", None) for each in inside)
    return int(next(filter(None, found), _text_config(model).vocab_size))


def readings(model: Any, packed: Any) -> Iterator[Reading]:
    """Yield the readings of a batch to try in turn: the kinds of rows they are right for, and their rules of positions.

    packed: the part of `model` that gets packed batches: the model itself, or the model below its head.
    """
    parameters = inspect.signature(packed.forward).parameters
    two_sided = bool(model.config.is_encoder_decoder) and "decoder_input_ids" in parameters
    config = _text_config(model)
    ids = _num_ids(model)
    by_token = type(model).__name__.endswith("ForTokenClassification")
    pad_id = getattr(config, "pad_token_id", None)
    by_row = type(model).__name__.endswith(BY_ROW)
    first = Reading(
        positions=None,
        shifted=not two_sided and not by_token and _is_causal_loss(model),
        rows=RowKind.PREFIX,
        two_sided=two_sided,
        decoder_ids=getattr(model, "prepare_decoder_input_ids_from_labels", None) if two_sided else None,
        bounds={
            "input_ids": ids,
            "decoder_input_ids": ids,
            "token_type_ids": getattr(config, "type_vocab_size", None) or 2,
            "labels": config.num_labels if by_token else ids,
        },
        pad_id=pad_id,
        pads_hold_pad_id=by_row and pad_id is not None,
        unsure=packed is not model,
    )
    windowed = getattr(config, "sliding_window", None) is not None  # a packed run counts windows in tokens
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)  # rounding would hide rules of positions
    kinds = (
        [RowKind.PREFIX]
        if half or packed is not model
        else [RowKind.CONTIGUOUS if windowed else RowKind.ANY, RowKind.PREFIX]
    )
    rules: list[Any] = [None]
    if not two_sided and "position_ids" in parameters:
        rules = [columns, counts, *([] if pad_id is None else [ids_counted(pad_id)])]
    shifts = (first.shifted,) if two_sided or packed is not model else (first.shifted, not first.shifted)
    for kind in kinds:
        for shifted in shifts:
            for rule in rules:
                yield replace(first, rows=kind, positions=rule, shifted=shifted)


def _is_causal_loss(model: Any) -> bool:
    losses = import_module("transformers.loss.loss_utils")
    return model.loss_function is losses.ForCausalLMLoss
