"""Attention of a block of queries to a block of keys, written out with its backward: every feature, every device.

The forms of `varlen_attention` cut their work into tiles (the CPU form: a piece of one row; the dense form: several
padded rows) and call `tile_forward` and `tile_backward`. Shapes: query (rows, heads_q, num_q, head_dim), key (rows,
heads_k, num_k, head_dim), value (rows, heads_k, num_k, head_dim_v). Scores are held in float32 (float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.torch_internals import softmax_backward_data

NEGATIVE_INFINITY = float("-inf")


class Rule(NamedTuple):
    """The computation of scores from products, equal for all rows of one call. See `varlen_attention`."""

    scale: float
    window_left: int = -1
    window_right: int = -1
    dropout_p: float = 0.0
    softcap: float = 0.0


class Call(NamedTuple):
    """The arguments of one call of `varlen_attention` besides query, key and value."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    rule: Rule
    bias: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None


class Saved(NamedTuple):
    """One call and its results, from which the backward starts.

    `output` is (tokens_q, heads_q, head_dim_v), `logsumexp` (heads_q, tokens_q). Logsumexp means the same in all forms,
    so it does not matter which form computed it. With sinks, both count them: a form that computes probabilities from
    the saved logsumexp, and their mean gradient from the saved output, needs to know nothing of sinks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor
    call: Call


# Of query, key, value and bias; the last is empty where it is not asked for.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


class Hidden(NamedTuple):
    """Pairs that must not see each other: `pairs` (..., num_q, n) bool, for the n keys from `first_key` on."""

    pairs: Tensor
    first_key: int = 0


class Extras(NamedTuple):
    """The bias, the hidden pairs and the dropout of one tile's scores.

    Tensors broadcast to (rows, heads_q, num_q, num_k).
    """

    hidden: Hidden | None = None
    bias: Tensor | None = None  # added to the scores
    dropout: Tensor | None = None  # the factor of each probability: 0 or 1 / (1 - dropout_p)
    may_be_empty: bool = False  # some query may see no key at all


class TileGradients(NamedTuple):
    """The gradients of `tile_forward`.

    `scores` is the gradient of the scores after softcap, which the bias was added to.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, logsumexp and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inner_adjacent(x: Tensor) -> Tensor:
    """Return (tokens, heads, head_dim) with a last dimension that is adjacent in memory."""
    return x if x.stride(2) == 1 else x.contiguous()


def hidden_by_window(num_q: int, num_k: int, shift: int, rule: Rule, device: torch.device) -> Hidden | None:
    """Return the pairs of `num_q` queries and `num_k` keys that the window hides, or None if it hides none.

    `shift` is the index of the first query minus the index of the first key, both counted inside their row.
    """
    left, right = rule.window_left, rule.window_right
    hides_left = left >= 0 and shift + num_q - 1 - left > 0
    hides_right = 0 <= right < num_k - 1 - shift
    if not (hides_left or hides_right):
        return None
    first_key = 0 if hides_left else max(0, shift + right + 1)  # the first query sees all keys up to this one
    queries = torch.arange(shift, shift + num_q, device=device).unsqueeze(1)
    distance = torch.arange(first_key, num_k, device=device) - queries
    if not hides_left:
        return Hidden(distance > right, first_key)
    if not hides_right:
        return Hidden(distance < -left)
    return Hidden((distance < -left) | (distance > right))


def tile_forward(query: Tensor, key: Tensor, value: Tensor, rule: Rule, extras: Extras) -> tuple[Tensor, Tensor]:
    """Return the output (rows, heads_q, num_q, head_dim_v) in the query's dtype and logsumexp (rows, heads_q, num_q).

    A query that sees no key has output 0 and logsumexp -inf.
    """
    rows, heads, num_q, _ = query.shape
    scores, _ = _scores(_fold_heads(query, key.size(1)), key, rule, extras, heads)
    probabilities = torch.softmax(scores, dim=-1)
    top = scores.amax(dim=-1, keepdim=True)
    # The largest probability is exp(largest score - logsumexp). This gives logsumexp without another exponential pass.
    logsumexp = top - probabilities.amax(dim=-1, keepdim=True).log_()
    if extras.may_be_empty:
        empty = top == NEGATIVE_INFINITY
        probabilities.masked_fill_(empty, 0.0)
        logsumexp.masked_fill_(empty, NEGATIVE_INFINITY)
    if extras.dropout is not None:
        probabilities.mul_(extras.dropout)
    folded = _fold_scores(probabilities, key.size(1)).to(value.dtype)
    output = torch.matmul(folded, value).view(rows, heads, num_q, value.size(3))
    return output, logsumexp.squeeze(-1)


def tile_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    extras: Extras,
    logsumexp: Tensor | None = None,
) -> TileGradients:
    """Return the gradients of `tile_forward`, computing its probabilities again.

    logsumexp: (rows, heads_q, num_q), where it counts more than the scores of these keys, such as sinks.
    """
    rows, heads, num_q, head_dim = query.shape
    heads_k = key.size(1)
    folded_query, folded_grad = _fold_heads(query, heads_k), _fold_heads(grad_output, heads_k)
    scores, capped = _scores(folded_query, key, rule, extras, heads)
    if logsumexp is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        probabilities = torch.exp(scores - logsumexp.unsqueeze(-1))
    if extras.may_be_empty:
        probabilities.masked_fill_(scores.amax(dim=-1, keepdim=True) == NEGATIVE_INFINITY, 0.0)
    del scores
    grad = torch.matmul(folded_grad, value.transpose(2, 3)).view(probabilities.shape).to(probabilities.dtype)
    kept = probabilities
    if extras.dropout is not None:
        grad.mul_(extras.dropout)
        kept = probabilities * extras.dropout
    grad_scores = softmax_backward_data(grad, probabilities, -1, probabilities.dtype)
    grad_value = torch.matmul(_fold_scores(kept, heads_k).to(value.dtype).transpose(2, 3), folded_grad)
    grad_products = grad_scores if capped is None else grad_scores * (1 - capped.square_())
    folded = _fold_scores(grad_products, heads_k).to(query.dtype)
    grad_query = torch.matmul(folded, key).mul_(rule.scale).view(rows, heads, num_q, head_dim)
    grad_key = torch.matmul(folded.transpose(2, 3), folded_query).mul_(rule.scale)
    return TileGradients(grad_query, grad_key, grad_value, grad_scores)


def dropout_factor(
    seed: Tensor, rows: Tensor, heads: int, queries: Tensor, keys: Tensor, dropout_p: float, dtype: torch.dtype
) -> Tensor:
    """Return factors 0 or 1 / (1 - dropout_p) of probabilities, (rows, heads, num_q, num_k).

    `rows` (rows,) are numbers of rows; `queries` (rows or 1, num_q) and `keys` (rows or 1, num_k) are indexes inside
    the row. A factor is a hash of (seed, row, head, query, key) and does not depend on how the work is cut up. The
    backward, a recomputed forward and every form of the operator therefore see the same draws, without a generator and
    without waiting for the device.
    """
    head = torch.arange(heads, device=seed.device).view(1, heads, 1)
    row = _mix64(_mix64(seed.view(1)) + rows.to(torch.int64)).view(-1, 1, 1)
    left = _mix64(row + _mix64(head) * 3 + queries.unsqueeze(1)).to(torch.int32).unsqueeze(-1)
    bits = left ^ (_mix64(keys.to(torch.int64)) >> 17).to(torch.int32).view(-1, 1, 1, keys.size(1))
    # lowbias32 (Wellons, hash-prospector) without its last step, which improves only the low bits; >> is arithmetic.
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    threshold = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31
    return (bits >= threshold).to(dtype).mul_(1.0 / (1.0 - dropout_p))


def _mix64(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 to int64, whose arithmetic shifts are masked to logical ones."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _scores(folded_query: Tensor, key: Tensor, rule: Rule, extras: Extras, heads: int) -> tuple[Tensor, Tensor | None]:
    """Return the scores (rows, heads_q, num_q, num_k) with all `extras` applied, and the tanh of a softcap."""
    rows, heads_k, folded_q, _ = folded_query.shape
    # Products in half precision would be rounded before the softmax, at some cost in accuracy.
    dtype = statistics_dtype(folded_query.dtype)
    products = torch.matmul(folded_query.to(dtype), key.to(dtype).transpose(2, 3))
    scores = products.mul_(rule.scale).view(rows, heads, folded_q * heads_k // heads, key.size(2))
    capped = None
    if rule.softcap > 0:
        capped = scores.div_(rule.softcap).tanh_()
        scores = capped * rule.softcap
    if extras.bias is not None:
        scores.add_(extras.bias)
    if extras.hidden is not None:
        first_key = extras.hidden.first_key
        target = scores.narrow(-1, first_key, scores.size(-1) - first_key) if first_key else scores
        target.masked_fill_(extras.hidden.pairs, NEGATIVE_INFINITY)
    return scores, capped


def _fold_heads(x: Tensor, heads_k: int) -> Tensor:
    """Fold queries that share keys: (rows, heads_q, num_q, d) -> (rows, heads_k, heads_q // heads_k * num_q, d)."""
    rows, heads, num_q, dim = x.shape
    return x if heads == heads_k else x.reshape(rows, heads_k, heads // heads_k * num_q, dim)


def _fold_scores(scores: Tensor, heads_k: int) -> Tensor:
    """View (rows, heads_q, num_q, num_k) as (rows, heads_k, heads_q // heads_k * num_q, num_k)."""
    rows, heads, num_q, num_k = scores.shape
    return scores if heads == heads_k else scores.view(rows, heads_k, heads // heads_k * num_q, num_k)
