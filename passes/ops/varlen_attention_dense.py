"""The form of `varlen_attention` for every device: padded rows and dense scores, a bounded number of them at a time.

This form is correct everywhere, fast nowhere, and never waits for the device. Tokens are laid into slots, (rows,
width): by their index inside the row, or, if a bias is indexed by positions, by their position, so that the bias needs
no gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import (
    NEGATIVE_INFINITY,
    Call,
    Extras,
    Gradients,
    Hidden,
    Saved,
    dropout_factor,
    statistics_dtype,
    tile_backward,
    tile_forward,
)

MAX_SCORES = 1 << 26  # most scores at once, unless one query of one row has more: 256 MiB in fp32


class Slots(NamedTuple):
    """The slots of the tokens of one side (queries or keys)."""

    slot: Tensor  # (tokens,) int64, into rows * width slots and one more for tokens that belong to no row
    row_index: Tensor  # (rows, width) int64, the token's index inside its row; -1: no token is here
    rows: int
    width: int

    def lay(self, x: Tensor) -> Tensor:
        """Lay out (tokens, heads, dim) as (rows, heads, width, dim), with zeros where there is no token."""
        return self.view(self.empty(x, x.size(2)).index_copy_(0, self.slot, x))

    def empty(self, like: Tensor, dim: int) -> Tensor:
        """Return zeros (rows * width + 1, heads, dim), to be filled in and picked from."""
        return like.new_zeros(self.rows * self.width + 1, like.size(1), dim)

    def view(self, laid: Tensor) -> Tensor:
        """View (rows * width + 1, heads, dim) as (rows, heads, width, dim)."""
        return laid[:-1].view(self.rows, self.width, *laid.shape[1:]).transpose(1, 2)

    def pick(self, laid: Tensor) -> Tensor:
        """Pick the tokens: (rows * width + 1, heads, dim) -> (tokens, heads, dim)."""
        return laid.index_select(0, self.slot)


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, max_scores: int = MAX_SCORES
) -> tuple[Tensor, Tensor]:
    """Return output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q)."""
    slots_q, slots_k = _slots(query, key, call)
    q_all, k_all, v_all = slots_q.lay(query), slots_k.lay(key), slots_k.lay(value)
    output = slots_q.empty(query, value.size(2))
    statistics = slots_q.empty(query, 1).to(statistics_dtype(query.dtype)).fill_(NEGATIVE_INFINITY)
    for rows, queries in _tiles(slots_q, slots_k, query.size(1), max_scores):
        extras = _extras(rows, queries, slots_q, slots_k, query, call)
        out, logsumexp = tile_forward(q_all[rows, :, queries], k_all[rows], v_all[rows], call.rule, extras)
        slots_q.view(output)[rows, :, queries] = out
        slots_q.view(statistics)[rows, :, queries] = logsumexp.unsqueeze(-1)
    return slots_q.pick(output), slots_q.pick(statistics).squeeze(-1).t().contiguous()


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool, max_scores: int = MAX_SCORES) -> Gradients:
    """Return the gradients of one call."""
    query, key, value, _, logsumexp, call = saved
    slots_q, slots_k = _slots(query, key, call)
    statistics = None if call.sinks is None else slots_q.lay(logsumexp.t().unsqueeze(-1)).squeeze(-1)
    g_all, q_all, k_all, v_all = slots_q.lay(grad_output), slots_q.lay(query), slots_k.lay(key), slots_k.lay(value)
    grad_query = slots_q.empty(query, query.size(2))
    dtype = statistics_dtype(query.dtype)  # tiles add up
    grad_key, grad_value = (slots_k.empty(x, x.size(2)).to(dtype) for x in (key, value))
    grad_bias = None
    if bias_gradient:
        assert call.bias is not None
        grad_bias = torch.zeros_like(call.bias, dtype=statistics_dtype(call.bias.dtype))
    for rows, queries in _tiles(slots_q, slots_k, query.size(1), max_scores):
        extras = _extras(rows, queries, slots_q, slots_k, query, call)
        q, g = q_all[rows, :, queries], g_all[rows, :, queries]
        lse = None if statistics is None else statistics[rows, :, queries]
        gradients = tile_backward(g, q, k_all[rows], v_all[rows], call.rule, extras, lse)
        slots_q.view(grad_query)[rows, :, queries] = gradients.query
        slots_k.view(grad_key)[rows] += gradients.key
        slots_k.view(grad_value)[rows] += gradients.value
        if grad_bias is not None:
            target = _bias_slice(grad_bias, rows, queries, slots_k.width)
            target += gradients.scores.sum_to_size(target.shape)
    return (
        slots_q.pick(grad_query),
        slots_k.pick(grad_key).to(key.dtype),
        slots_k.pick(grad_value).to(value.dtype),
        query.new_empty(0) if grad_bias is None or call.bias is None else grad_bias.to(call.bias.dtype),
    )


def _slots(query: Tensor, key: Tensor, call: Call) -> tuple[Slots, Slots]:
    sides = []
    for dim, x, cumulative, longest, positions in (
        (2, query, call.cu_seqlens_q, call.max_q, call.positions_q),
        (3, key, call.cu_seqlens_k, call.max_k, call.positions_k),
    ):
        by_position = call.bias is not None and positions is not None and call.bias.size(dim) > 1
        width = call.bias.size(dim) if by_position and call.bias is not None else longest
        sides.append(laid_out(x.size(0), cumulative, width, positions if by_position else None))
    return sides[0], sides[1]


def laid_out(tokens: int, cumulative: Tensor, width: int, positions: Tensor | None) -> Slots:
    """Return the slots of tokens by their position, or by their index inside the row, in rows of `width` slots."""
    rows = cumulative.size(0) - 1
    cumulative = cumulative.to(torch.int64)
    token = torch.arange(tokens, device=cumulative.device)
    row = torch.searchsorted(cumulative[1:], token, right=True)  # the number of rows, for tokens beyond the last row
    index = token - cumulative[row]
    within = index if positions is None else positions
    slot = torch.where(row < rows, row * width + within, rows * width)
    laid = torch.full((rows * width + 1,), -1, device=cumulative.device).index_copy_(0, slot, index)
    return Slots(slot, laid[:-1].view(rows, width), rows, width)


def _tiles(slots_q: Slots, slots_k: Slots, heads: int, max_scores: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and of query slots, so that one tile has about `max_scores` scores at most."""
    if not (slots_q.rows and slots_q.width and slots_k.width):
        return  # nothing to compute: outputs and gradients keep their initial zeros
    queries = max(1, min(slots_q.width, max_scores // (heads * slots_k.width)))
    rows = max(1, max_scores // (heads * slots_q.width * slots_k.width))
    for row in range(0, slots_q.rows, rows):
        for query in range(0, slots_q.width, queries):
            yield slice(row, min(row + rows, slots_q.rows)), slice(query, min(query + queries, slots_q.width))


def _extras(rows: slice, queries: slice, slots_q: Slots, slots_k: Slots, query: Tensor, call: Call) -> Extras:
    rule = call.rule
    at_q, at_k = slots_q.row_index[rows, queries], slots_k.row_index[rows]
    hidden = (at_k < 0).unsqueeze(1)
    if rule.window_left >= 0 or rule.window_right >= 0:
        distance = at_k.unsqueeze(1) - at_q.unsqueeze(2)
        if rule.window_left >= 0:
            hidden = hidden | (distance < -rule.window_left)
        if rule.window_right >= 0:
            hidden = hidden | (distance > rule.window_right)
    bias = None if call.bias is None else _bias_slice(call.bias, rows, queries, slots_k.width)
    dropout = None
    if rule.dropout_p > 0:
        assert call.seed is not None
        numbers = torch.arange(rows.start, rows.stop, device=query.device)
        dtype = statistics_dtype(query.dtype)
        dropout = dropout_factor(call.seed, numbers, query.size(1), at_q, at_k, rule.dropout_p, dtype)
    return Extras(Hidden(hidden.unsqueeze(1)), bias, dropout, may_be_empty=True)


def _bias_slice(bias: Tensor, rows: slice, queries: slice, width_k: int) -> Tensor:
    """Return the part of `bias` for these slots, as a view. Dimensions of size 1 are broadcast."""
    bias = bias[rows] if bias.size(0) > 1 else bias
    bias = bias[:, :, queries] if bias.size(2) > 1 else bias
    return bias[:, :, :, :width_k] if bias.size(3) > 1 else bias
