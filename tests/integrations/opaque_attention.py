"""Stand-ins, on the CPU, for attention kernels that graphs show as one opaque call: FlashAttention's and flex.

They replace what transformers would import for a GPU, with the arguments that the kernels have; how transformers
unpads, masks, casts and calls them stays its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor


def _flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    dropout_p: float,
) -> Tensor:
    """Tokens of all rows one after another: (tokens, heads, head_dim). Windows are for self-attention."""
    row_q = torch.searchsorted(cu_seqlens_q, torch.arange(q.shape[0]), right=True)
    row_k = torch.searchsorted(cu_seqlens_k, torch.arange(k.shape[0]), right=True)
    distance = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None]
    left, right = window_size[0], 0 if causal else window_size[1]
    allowed = row_q[:, None] == row_k[None]
    allowed = allowed & (distance >= -left) if left >= 0 else allowed
    allowed = allowed & (distance <= right) if right >= 0 else allowed
    keys, values = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", torch.dropout(probabilities, dropout_p, True), values)


class FlashCalls:
    """The functions of a flash package, which count their calls; `drops`: whether they have dropout, as version 2."""

    def __init__(self, drops: bool) -> None:
        self.count = 0
        self.drops = drops

    def functions(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """For rows of one length, and of several."""
        calls = self

        def varlen(  # the names are those that transformers looks for
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            softcap: float = 0.0,
            deterministic: bool = False,
        ) -> Tensor:
            calls.count += 1
            return _flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap, 0.0)

        def varlen_with_dropout(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            dropout_p: float = 0.0,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            softcap: float = 0.0,
            deterministic: bool = False,
        ) -> Tensor:
            calls.count += 1
            return _flash_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap, dropout_p
            )

        def whole(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            rows, positions = q.shape[:2]
            cu_seqlens = torch.arange(0, rows * positions + 1, positions, dtype=torch.int32)
            flat = (each.flatten(0, 1) for each in (q, k, v))
            found = chosen(*flat, cu_seqlens, cu_seqlens, positions, positions, **given)
            return found.unflatten(0, (rows, positions))

        chosen: Callable[..., Tensor] = varlen_with_dropout if self.drops else varlen
        return whole, chosen


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor],
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> Tensor:
    """`flex_attention`, which has no backward on the CPU."""
    from torch.nn.attention.flex_attention import create_mask

    rows, heads, tokens_q, head_dim = query.shape
    if enable_gqa:
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or head_dim**-0.5)
    at = [
        torch.arange(size).view([-1 if dim == own else 1 for dim in range(4)]) for own, size in enumerate(scores.shape)
    ]
    scores = score_mod(scores, *at)
    if block_mask is not None:
        allowed = create_mask(block_mask.mask_mod, rows, 1, tokens_q, key.shape[2], device="cpu")
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ value


def in_transformers(function: Any) -> Any:
    """A function as if it stood in transformers: of the script's own nobody knows how far they reach."""
    there = {**function.__globals__, "__name__": "transformers.models.llama.modeling_llama"}
    moved = FunctionType(function.__code__, there, function.__name__, function.__defaults__, function.__closure__)
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved


def install(monkeypatch: pytest.MonkeyPatch, implementation: str) -> FlashCalls:
    """Have transformers find them; returns what counts the calls of its flash kernels."""
    from transformers import PreTrainedModel, masking_utils, modeling_flash_attention_utils
    from transformers.integrations import flex_attention

    used = modeling_flash_attention_utils
    calls = FlashCalls(drops=implementation == "flash_attention_2")
    functions = (*calls.functions(), None, used._pad_input, used._unpad_input)
    monkeypatch.setattr(used, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(used, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", in_transformers(lambda *_, **__: True))
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", _flex)
    create = masking_utils.create_block_mask  # each of its shapes is a compile
    uncompiled = {"_compile": False}
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *args, **given: create(*args, **given | uncompiled))
    return calls
