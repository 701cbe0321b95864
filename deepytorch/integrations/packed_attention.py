"""Attention on packed rows inside of a Hugging Face model, whatever attention implementation the model was given.

A packed batch is one long row. Its layout reaches a layer as the attention mask: a tensor of four dimensions, which
transformers hands through to the attention function as it is. The layout is a tensor because arguments survive
activation checkpointing, `torch.compile` and data-parallel wrappers, and state outside of the model would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepytorch.passes.ops.varlen_attention import varlen_attention
from deepytorch.patches import replace

# Arguments that models hand to their attention and that change no result: none of transformers' attention functions
# reads them (paged ones read a cache, and are declined). The effect of any other argument is unknown: indices of
# blocks, lengths of rows that were packed already.
WITHOUT_EFFECT = frozenset(
    (
        "position_ids",
        "position_embeddings",
        "token_type_ids",
        "cache",
        "past_key_values",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "deterministic",
        "layer_idx",
        "kernel_options",
    )
)
# Transformers' own implementations; one behind another name may have windows that no small probe shows.
IN_GRAPHS = (None, "eager", "sdpa")
FLASH_WITH_DROPOUT = (
    "flash_attention_2",
    "kernels-community/flash-attn",
    "kernels-community/flash-attn2",
    "kernels-community/aiter-flash-attn",
)
FLASH = (
    *FLASH_WITH_DROPOUT,
    "flash_attention_3",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
    "flash_attention_4",
    "kernels-community/flash-attn4",
)
CACHED_KEYS = "cached_keys"  # an argument of `attend`, which models hand through from their own arguments
OPAQUE = (*FLASH, "flex_attention")  # a graph breaks at these, or has one node that does not show the inside


def plain_name(implementation: Any) -> Any:
    """Return a flash implementation's name as in `FLASH`: "owner/kernel" for "paged|owner/kernel@revision:function".

    Any other name is returned as it is.
    """
    bare = str(implementation).removeprefix("paged|").partition(":")[0].partition("@")[0].strip()
    return bare if bare in FLASH else implementation


class CannotPack(Exception):
    """An error, with the reason, for a model or an attention that cannot run on packed rows."""


class Rows(NamedTuple):
    """The places of one side's rows in its packed row.

    cu_seqlens: (rows + 1,) int32, the begin of each row. positions: (tokens,) int32, the column of each token. extent:
    one more than the largest column.
    """

    cu_seqlens: Tensor
    positions: Tensor
    extent: int


def encode_mask(keys: Rows, cross: Rows | None = None) -> Tensor:
    """Return the attention mask of layers whose keys are `keys`, and whose queries are the same tokens or `cross`.

    The mask is (extent of keys, extent of cross, rows + 1, entries) int32. Its last dimension holds numbers; the others
    are sizes that take no memory. `keys` and `cross` must differ in their number of tokens, which tells self-attention
    from cross-attention.
    """
    cross = keys if cross is None else cross
    numbers = torch.cat((keys.cu_seqlens, cross.cu_seqlens, keys.positions, cross.positions))
    return numbers.expand(keys.extent, cross.extent, keys.cu_seqlens.shape[0], numbers.shape[0])


def decode_mask(mask: Tensor, tokens_q: int, tokens_k: int) -> tuple[Rows, Rows]:
    """Return the rows of an attention's queries and of its keys, from its mask and the numbers of both."""
    numbers, offsets = mask[0, 0, 0], mask.shape[2]
    places = numbers[2 * offsets :]
    keys = Rows(numbers[:offsets], places[:tokens_k], mask.shape[0])
    if tokens_q == tokens_k:
        return keys, keys
    if places.shape[0] != tokens_q + tokens_k:
        raise CannotPack(f"an attention has {tokens_q} queries and {tokens_k} keys, which are of no side of the batch")
    return Rows(numbers[offsets : 2 * offsets], places[tokens_k:], mask.shape[1]), keys


def is_packed(mask: object) -> bool:
    """Return whether an attention mask is an encoded one. No attention takes other masks of int32."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cached_keys: int = 0,
    implementation: str | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute attention on packed rows; the signature is that of transformers' attention functions.

    Returns (1, tokens, heads, head_dim). Masks have the meaning of transformers' FlashAttention: causal by `is_causal`,
    or by the module's; the last `sliding_window` keys; softcap. Raises `CannotPack` for anything else that may change
    scores.

    Args:
        module: The attention module.
        query: (1, heads, tokens, head_dim).
        key: As `query`.
        value: As `query`.
        attention_mask: A mask of `encode_mask`.
        scaling: The factor of the scores.
        dropout: The probability of dropout.
        sliding_window: The number of keys in reach.
        softcap: The bound of the scores.
        position_bias: (1, heads or 1, extent or 1, extent or 1), added to the scores.
        s_aux: (heads,), attention sinks.
        is_causal: Whether attention is causal; None: as the module says.
        cached_keys: The number of keys that each row begins with, before those of its queries.
        implementation: The plain name of the implementation that this function replaces.
        other: Further arguments of the model's.
    """
    if s_aux is not None and implementation == "sdpa":  # transformers' function drops them
        raise CannotPack(f"{type(module).__name__} gives its attention s_aux")
    _refuse_unknown(module, query, dropout, implementation, other)
    flash = implementation in FLASH
    if flash and implementation not in FLASH_WITH_DROPOUT:
        dropout = 0.0  # transformers passes dropout only to kernels that have it, and else trains without
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal and not flash:
        raise CannotPack(f"{type(module).__name__} has a window to both sides")
    reach = -1 if sliding_window is None else sliding_window - 1  # of flash without causality: to both sides
    if cached_keys and (sliding_window is not None or position_bias is not None):
        raise CannotPack(f"{type(module).__name__} has a window or a bias of positions over cached keys")
    if cached_keys and query.shape[2] == key.shape[2]:
        raise CannotPack(f"{type(module).__name__} attends without its cached keys")
    queries, keys = decode_mask(attention_mask, query.shape[2], key.shape[2])
    if position_bias is not None and position_bias.shape[3] == 1:  # equal for all keys: softmax does not change
        position_bias = None
    output = varlen_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.extent,
        keys.extent,
        bias=position_bias,
        positions_q=None if position_bias is None else queries.positions.long(),
        positions_k=None if position_bias is None else keys.positions.long(),
        sinks=s_aux,
        scale=scaling,
        window_left=reach,
        window_right=cached_keys if causal else reach,  # the query at place i of its row is of key cached_keys + i
        dropout_p=dropout,
        softcap=softcap or 0.0,
    )
    return output[None], None


def _refuse_unknown(
    module: nn.Module, query: Tensor, dropout: float, implementation: str | None, other: dict[str, Any]
) -> None:
    """Raise `CannotPack` for features of the padded attention that ours lacks, even if a probe shows no difference."""
    kind = type(module).__name__
    strange = [name for name, value in other.items() if value is not None and name not in WITHOUT_EFFECT]
    if strange:
        raise CannotPack(f"{kind} gives its attention {', '.join(strange)}")
    if query.shape[0] != 1:
        raise CannotPack(f"{kind} gives its attention more than one row")
    if dropout and implementation == "flex_attention":  # where transformers raises as well
        raise CannotPack(f"{implementation} has no dropout, and {kind} asks for it")


def attach(modeling_utils: Any) -> None:
    """Have transformers' `AttentionInterface` return functions that know packed masks.

    A call with any other mask goes to the original function, with its arguments unchanged.
    """

    def knowing_packed_masks(original: Any) -> Any:
        def get_interface(self: Any, *asked: Any) -> Callable[..., Any]:
            given, implementation = original(self, *asked), plain_name(asked[0])

            @functools.wraps(given)
            def either(
                module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
            ) -> Any:
                if not is_packed(attention_mask):
                    return given(module, query, key, value, attention_mask, *args, **kwargs)
                dtype = _dtype_for_flash(query, module) if implementation in FLASH else None
                if dtype is not None:  # float32, of norms that PEFT keeps in it: transformers casts it for flash
                    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
                kwargs["implementation"] = implementation
                return attend(module, query, key, value, attention_mask, *args, **kwargs)

            return either

        return get_interface

    interface = modeling_utils.AttentionInterface
    way = "get_interface" if asks_for_every_attention(modeling_utils) else "__getitem__"
    replace(interface, way, knowing_packed_masks, "attend in packed rows", always=True)


def _dtype_for_flash(query: Tensor, module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which transformers 4 and 5 cast float32 rows for a flash kernel; None if it is not given."""
    if query.dtype != torch.float32:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config: Any = getattr(module, "config", None)
    before: torch.dtype | None = getattr(config, "_pre_quantization_dtype", None)
    if before is not None:
        return before
    if hasattr(config, "_is_quantized"):
        return config.dtype  # type: ignore[no-any-return]
    return next((each.weight.dtype for each in module.modules() if isinstance(each, nn.Linear)), None)


def asks_for_every_attention(modeling_utils: Any) -> bool:
    """Return whether models ask `AttentionInterface` for "eager" too; up to transformers 4 they call their own."""
    return hasattr(modeling_utils.AttentionInterface, "get_interface")


def implementations(model: Any) -> set[Any]:
    """Return the plain names of the attention implementations that a Hugging Face model and its parts are set to."""
    given = (vars(each).get("config") for each in model.modules())  # a module is slow to look up a missing attribute
    configs = {id(config): config for config in given if config is not None}
    return {plain_name(getattr(config, "_attn_implementation", None)) for config in configs.values()}


def has_learned_bias(module: nn.Module) -> bool:
    """Return whether a module is an attention that adds a learned bias of relative positions, as T5's."""
    return callable(getattr(module, "compute_bias", None)) and hasattr(module, "has_relative_attention_bias")


def call_with_bias(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an attention with a learned bias; on packed rows its bias is made for the longest row, not for all tokens.

    The bias is made at the point where the padded call makes it, so that weights are gathered in the same order
    (ZeRO-3). The bias depends on distances only, of which there are few; Inductor would compute it anew for every pair,
    and add up its gradient over the pairs.
    """
    mask = kwargs.get("mask")
    if not is_packed(mask) or kwargs.get("position_bias") is not None:
        return module._call_impl(*args, **kwargs)
    assert mask is not None
    if not module.has_relative_attention_bias:
        kwargs["position_bias"] = torch.zeros(1, 1, 1, 1, device=mask.device, dtype=module.q.weight.dtype)
        return module._call_impl(*args, **kwargs)
    compute, extent = module.compute_bias, mask.shape[0]  # between tokens of one side

    def compute_bias(*_: Any, **__: Any) -> Tensor:
        return _by_distance(compute(1, 2 * extent, device=mask.device, past_seen_tokens=extent), extent)

    vars(module)["compute_bias"] = compute_bias
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        del vars(module)["compute_bias"]


def _by_distance(distances: Tensor, extent: int) -> Tensor:
    """Spread a bias by distance, (1, heads, 1, 2 * extent), over all pairs, (1, heads, extent, extent).

    The distances begin with that of the key `extent` before a query. Copies of them are viewed as rows of one entry
    less, so that each row begins one distance earlier than the row above it (the shift of Transformer-XL, Dai et al.
    2019, appendix B).
    """
    heads = distances.shape[1]
    copies = distances.expand(1, heads, extent, 2 * extent).reshape(1, heads, -1)
    rows = copies[..., extent : 2 * extent * extent].view(1, heads, extent, 2 * extent - 1)
    return rows[..., :extent]
