"""The CPU form of `varlen_attention`: deepytorch's kernels over all rows, or a loop over rows inside the operator.

Calls without extra features run on the kernels of `native` if these are compiled, else row by row on torch's own CPU
flash kernel, forward and backward. All other calls are computed by `attention_tile`. A row under a window is cut into
pieces of queries, each with the keys that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_bias import BiasGradient, Span, span
from deepytorch.passes.ops.attention_tile import (
    NEGATIVE_INFINITY,
    Call,
    Extras,
    Gradients,
    Hidden,
    Saved,
    dropout_factor,
    hidden_by_window,
    inner_adjacent,
    statistics_dtype,
    tile_backward,
    tile_forward,
)
from deepytorch.passes.ops.native import KERNELS
from deepytorch.torch_internals import cpu_flash_attention, cpu_flash_attention_backward

_TILE_QUERIES = 64  # 64 to 128 were the fastest of 32 to 256 (8 heads of 64, rows of 32 to 1024, fp32): a tile in cache

_MOST_KEYS = 4096  # of a row, for the kernels of `native`: the scores of 64 queries take half of a large L2 cache


class Tile(NamedTuple):
    """Queries q0:q1 of one row against its keys k0:k1. All of these count tokens of the whole batch."""

    row: int
    q0: int
    q1: int
    k0: int
    k1: int
    row_q0: int  # where the row's queries begin
    row_k0: int  # where its keys begin and end
    row_k1: int
    causal: bool | None  # whether the flash kernel must be causal; None if it cannot compute this tile

    @property
    def queries(self) -> range:
        """Return the queries' indexes inside the row."""
        return range(self.q0 - self.row_q0, self.q1 - self.row_q0)

    @property
    def keys(self) -> range:
        """Return the keys' indexes inside the row."""
        return range(self.k0 - self.row_k0, self.k1 - self.row_k0)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q)."""
    if (kernels := _kernels(query, value, call)) is not None:
        output, logsumexp = kernels.varlen_attention(*_in_float32(query, key, value), *_described(call))
        return output.to(query.dtype), logsumexp
    dtype, heads, dim_v = query.dtype, query.size(1), value.size(2)
    q_all, k_all, v_all = (_heads_first(x) for x in (query, key, value))
    overlay = _Overlay(call, heads, statistics_dtype(query.dtype))
    outputs, statistics = [], []
    for tile in _tiles(query, value, call):
        num_q, num_k = len(tile.queries), len(tile.keys)
        if num_k == 0:
            outputs.append(q_all.new_zeros(1, num_q, heads, dim_v))
            statistics.append(q_all.new_full((1, heads, num_q), NEGATIVE_INFINITY, dtype=statistics_dtype(q_all.dtype)))
            continue
        q, k, v = q_all.narrow(2, tile.q0, num_q), k_all.narrow(2, tile.k0, num_k), v_all.narrow(2, tile.k0, num_k)
        if tile.causal is None:
            output, logsumexp = tile_forward(q, k, v, call.rule, overlay.of(tile)[0])
        else:
            output, logsumexp = cpu_flash_attention(q, k, v, 0.0, tile.causal, scale=call.rule.scale)
        outputs.append(output.transpose(1, 2))
        statistics.append(logsumexp)
    return torch.cat(outputs, dim=1).squeeze(0).to(dtype), torch.cat(statistics, dim=2).squeeze(0)


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool) -> Gradients:
    """Return the gradients of one call."""
    query, key, value, output, logsumexp, call = saved
    if (kernels := _kernels(query, value, call)) is not None:
        tensors = _in_float32(grad_output, query, key, value, output)
        found = kernels.varlen_attention_backward(*tensors, logsumexp.contiguous(), *_described(call))
        grads = [grad.to(x.dtype) for grad, x in zip(found, (query, key, value), strict=True)]
        return grads[0], grads[1], grads[2], query.new_empty(0)
    g_all, q_all, k_all, v_all, o_all = (_heads_first(x) for x in (grad_output, query, key, value, output))
    lse_all = logsumexp.unsqueeze(0)
    heads, head_dim = query.size(1), query.size(2)
    overlay = _Overlay(call, heads, statistics_dtype(query.dtype))
    grad_query: list[Tensor] = []
    grad_key, grad_value = _Summed(k_all), _Summed(v_all)
    grad_bias = BiasGradient(call.bias) if bias_gradient and call.bias is not None else None
    for tile in _tiles(query, value, call):
        num_q, num_k = len(tile.queries), len(tile.keys)
        if num_k == 0:
            grad_query.append(q_all.new_zeros(1, num_q, heads, head_dim))
            continue
        g, q = g_all.narrow(2, tile.q0, num_q), q_all.narrow(2, tile.q0, num_q)
        k, v = k_all.narrow(2, tile.k0, num_k), v_all.narrow(2, tile.k0, num_k)
        if tile.causal is None:
            extras, at_q, at_k = overlay.of(tile)
            lse = None if call.sinks is None else lse_all.narrow(2, tile.q0, num_q)
            grad_q, grad_k, grad_v, grad_scores = tile_backward(g, q, k, v, call.rule, extras, lse)
            if grad_bias is not None:
                grad_bias.add(tile.row, grad_scores[0], at_q, at_k)
        else:
            o, lse = o_all.narrow(2, tile.q0, num_q), lse_all.narrow(2, tile.q0, num_q)
            scale = call.rule.scale
            grad_q, grad_k, grad_v = cpu_flash_attention_backward(g, q, k, v, o, lse, 0.0, tile.causal, scale=scale)
        grad_query.append(grad_q.transpose(1, 2))
        grad_key.add(tile, grad_k.transpose(1, 2))
        grad_value.add(tile, grad_v.transpose(1, 2))
    return (
        torch.cat(grad_query, dim=1).squeeze(0).to(query.dtype),
        grad_key.joined(key.dtype),
        grad_value.joined(value.dtype),
        query.new_empty(0) if grad_bias is None else grad_bias.result(),
    )


def _kernels(query: Tensor, value: Tensor, call: Call) -> ModuleType | None:
    """Return the kernels of `native` if they are available and can compute this call.

    The call must be float32, causal or full, and have no other feature. If float32 products may be computed in lower
    precision, torch does so and takes the call: a backward of `native` would not match torch's forward.
    """
    rule = call.rule
    in_float32 = query.dtype == torch.float32 or _casts(query.dtype)
    plain = call.bias is None and rule.softcap == 0 and rule.dropout_p == 0
    causal = rule.window_right == 0
    sees_all_left = rule.window_left < 0 or rule.window_left >= call.max_q - 1
    sees_all_right = rule.window_right < 0 or rule.window_right >= call.max_k - 1
    some = query.numel() > 0 and value.numel() > 0
    in_full = torch.get_float32_matmul_precision() != "medium"
    if not (in_float32 and in_full and plain and some and sees_all_left and call.max_k <= _MOST_KEYS):
        return None
    return KERNELS.get() if sees_all_right or causal else None


def _described(call: Call) -> tuple[Tensor, Tensor, float, bool]:
    """Return the arguments of the kernels of `native` behind the tensors: where rows begin, the scale, if causal."""
    rule = call.rule
    return call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous(), rule.scale, rule.window_right == 0


def _in_float32(*tensors: Tensor) -> list[Tensor]:
    return [inner_adjacent(x.float()) for x in tensors]


def _tiles(query: Tensor, value: Tensor, call: Call) -> Iterator[Tile]:
    """Yield all queries, in order and without a gap, in pieces with the keys that they may see."""
    left, right = call.rule.window_left, call.rule.window_right
    plain = query.size(2) == value.size(2) and call.bias is None and call.rule.softcap == 0 and call.rule.dropout_p == 0
    starts_q = call.cu_seqlens_q.tolist()
    starts_k = starts_q if call.cu_seqlens_k is call.cu_seqlens_q else call.cu_seqlens_k.tolist()
    for row in range(len(starts_q) - 1):
        q0, q1, k0, k1 = starts_q[row], starts_q[row + 1], starts_k[row], starts_k[row + 1]
        num_q, num_k = q1 - q0, k1 - k0
        if num_q == 0:
            continue
        sees_all_left = left < 0 or left >= num_q - 1
        full = sees_all_left and (right < 0 or right >= num_k - 1)
        if plain and num_k > 0 and (full or (sees_all_left and right == 0)):
            yield Tile(row, q0, q1, k0, k1, q0, k0, k1, not full)
            continue
        for first in range(0, num_q, _TILE_QUERIES):
            last = min(first + _TILE_QUERIES, num_q)
            low = 0 if left < 0 else min(num_k, max(0, first - left))
            high = num_k if right < 0 else min(num_k, last + right)
            yield Tile(row, q0 + first, q0 + last, k0 + low, k0 + max(low, high), q0, k0, k1, None)
    tokens, end, end_k = query.size(0), starts_q[-1], starts_k[-1]
    if tokens > end or tokens == 0:  # tokens beyond the last row see no key; without any, one tile gives the shape
        yield Tile(len(starts_q) - 1, end, tokens, end_k, end_k, end, end_k, end_k, None)


class _Overlay:
    """The bias, hidden pairs and dropout of the tiles of one call.

    Tiles of one shape share the pairs that the window hides.
    """

    def __init__(self, call: Call, heads: int, dtype: torch.dtype) -> None:
        self._call = call
        self._heads = heads
        self._dtype = dtype
        self._hidden: dict[tuple[int, int, int], Hidden | None] = {}

    def of(self, tile: Tile) -> tuple[Extras, Span, Span]:
        """Return the extras of `tile`, and the places of its queries and keys in the bias."""
        call, bias, dropout = self._call, None, None
        at_q = at_k = Span(0, 0)
        if call.bias is not None:
            bias = call.bias[tile.row if call.bias.size(0) > 1 else 0]
            at_q = span(bias, 1, call.positions_q, tile.q0, tile.q1, tile.row_q0)
            at_k = span(bias, 2, call.positions_k, tile.k0, tile.k1, tile.row_k0)
            bias = at_k.of(at_q.of(bias, 1), 2)
        if call.rule.dropout_p > 0:
            assert call.seed is not None
            queries, keys = (torch.arange(r.start, r.stop).unsqueeze(0) for r in (tile.queries, tile.keys))
            row, drop = torch.tensor([tile.row]), call.rule.dropout_p
            dropout = dropout_factor(call.seed, row, self._heads, queries, keys, drop, self._dtype)
        left = call.rule.window_left
        sees_none = left >= 0 and tile.queries.stop - 1 - left >= tile.keys.stop
        return Extras(self._hidden_by_window(tile), bias, dropout, bias is not None or sees_none), at_q, at_k

    def _hidden_by_window(self, tile: Tile) -> Hidden | None:
        shape = (len(tile.queries), len(tile.keys), tile.queries.start - tile.keys.start)
        if shape not in self._hidden:
            self._hidden[shape] = hidden_by_window(*shape, self._call.rule, torch.device("cpu"))
        return self._hidden[shape]


class _Summed:
    """The gradient of keys or values: tiles of one row may share keys, rows do not."""

    def __init__(self, like: Tensor) -> None:
        self._like = like  # (1, heads, tokens, dim)
        self._parts: list[Tensor] = []  # (1, tokens, heads, dim)
        self._end = 0  # every token before this one is in a part

    def add(self, tile: Tile, gradient: Tensor) -> None:
        """Add the gradient (1, num_k, heads, dim) of the keys of a tile; tiles come in order."""
        if tile.row_k1 > self._end:  # the first tile of its row
            self._fill(tile.row_k0)
            if (tile.k0, tile.k1) == (tile.row_k0, tile.row_k1):
                self._parts.append(gradient)
                self._end = tile.k1
                return
            self._fill(tile.row_k1)
        self._parts[-1].narrow(1, tile.k0 - tile.row_k0, tile.k1 - tile.k0).add_(gradient)

    def joined(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient (tokens, heads, dim), contiguous."""
        tokens = self._like.size(2)
        if tokens > self._end or not self._parts:
            self._fill(tokens)
        return torch.cat(self._parts, dim=1).squeeze(0).to(dtype)

    def _fill(self, end: int) -> None:
        if end > self._end or not self._parts:
            _, heads, _, dim = self._like.shape
            self._parts.append(self._like.new_zeros(1, end - self._end, heads, dim))
            self._end = end


def _casts(dtype: torch.dtype) -> bool:
    """Return whether tensors of this narrower dtype are computed in float32."""
    return dtype in _HALF_UNITS and not _HALF_UNITS[dtype]()


def _heads_first(x: Tensor) -> Tensor:
    """Convert (tokens, heads, dim) to (1, heads, tokens, dim) in the dtype of the computation."""
    if _casts(x.dtype):
        x = x.float()
    # The flash kernel assumes that head elements are adjacent, and does not check it.
    return inner_adjacent(x).transpose(0, 1).unsqueeze(0)


# On CPUs without matrix units for half precision, torch's half kernels are slower than fp32 with a cast (backward of a
# row of 256 tokens, 8 heads of 64, AVX-512 with bf16: bf16 2.4 ms, fp16 19.9 ms, fp32 1.9 ms), most of all for short
# rows, and less accurate.
_HALF_UNITS = {
    torch.bfloat16: cache(getattr(torch.cpu, "_is_amx_tile_supported", bool)),
    torch.float16: cache(getattr(torch.cpu, "_is_amx_fp16_supported", bool)),
}
