# mypy: disable-error-code="no-untyped-def"
"""A Triton kernel for the gradient of the bias of `varlen_attention`, without atomics.

One program adds up one tile of the bias over the rows and heads that share it. If a dimension of the bias is broadcast,
or if too few tiles would leave the device idle, programs write separate partial sums, which the launch adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepytorch.passes.ops.varlen_attention_kernels import (
    SIZES,
    dot,
    kept_pairs,
    scores_of,
    stored_exponents,
)


@triton.jit
def _index_at(indexes, row, slot, width, num):
    """Return the token of `row` that stands at each slot, or `num` where there is none."""
    if indexes is None:
        return slot
    else:
        found = tl.load(indexes + row.to(tl.int64) * width + slot, mask=slot < width, other=-1).to(tl.int32)
        return tl.where(found < 0, num, found)


@triton.jit
def _gather(pointer, start, index, num, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load tokens `index` of the row that begins at `start`: (indexes, BLOCK)."""
    dims = tl.arange(0, BLOCK)[None, :]
    mask = (index < num)[:, None]
    if DIM < BLOCK:
        mask = mask & (dims < DIM)
    return tl.load(pointer + start.to(tl.int64) * stride + (index.to(tl.int64) * stride)[:, None] + dims, mask, 0.0)


@triton.jit(do_not_specialize=SIZES)
def grad_bias_kernel(
    query, key, value, grad_output, logsumexp, delta, partial,
    cu_seqlens_q, cu_seqlens_k, bias, indexes_q, indexes_k, drawn_q, drawn_k,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, bias_row, bias_head, bias_q, bias_k,
    num_blocks_q, num_blocks_k, bias_heads, bias_rows, shared_heads, shared, shared_each, width_q, width_k,
    group, tokens_q, scale, softcap, window_left, window_right, threshold, kept_factor,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, SUM_Q: tl.constexpr, SUM_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `partial` (parts, bias_rows, bias_heads, width_q or num_blocks_q, width_k or num_blocks_k).

    `shared` pairs of row and head share an entry, and `shared_each` of them are added up here. `indexes_q` (rows,
    width_q) holds the query at each place, -1 for none; without it query i stands at place i. Likewise for keys.
    """
    program = tl.program_id(0)
    block_k = program % num_blocks_k
    block_q = program // num_blocks_k % num_blocks_q
    plane = program // num_blocks_k // num_blocks_q  # of partial: its first three dimensions
    first_head = plane % bias_heads
    first_row = plane // bias_heads % bias_rows
    part = plane // bias_heads // bias_rows
    slot_q, slot_k = block_q * BLOCK_Q + tl.arange(0, BLOCK_Q), block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for item in range(part * shared_each, tl.minimum(shared, part * shared_each + shared_each)):
        row, head = first_row + item // shared_heads, first_head + item % shared_heads
        start_q, start_k = tl.load(cu_seqlens_q + row), tl.load(cu_seqlens_k + row)
        num_q, num_k = tl.load(cu_seqlens_q + row + 1) - start_q, tl.load(cu_seqlens_k + row + 1) - start_k
        some = (num_q > 0) & (num_k > 0)
        if indexes_q is None:
            some = some & (block_q * BLOCK_Q < num_q)
        if indexes_k is None:
            some = some & (block_k * BLOCK_K < num_k)
        if indexes_q is None and indexes_k is None:
            if LEFT:
                some = some & (block_k * BLOCK_K + BLOCK_K > block_q * BLOCK_Q - window_left)
            if RIGHT:
                some = some & (block_k * BLOCK_K < block_q * BLOCK_Q + BLOCK_Q + window_right)
        if some:
            head_long, head_k = head.to(tl.int64), (head // group).to(tl.int64)
            i = _index_at(indexes_q, row, slot_q, width_q, num_q)
            j = _index_at(indexes_k, row, slot_k, width_k, num_k)
            q = _gather(query + head_long * q_head, start_q, i, num_q, q_token, HEAD_DIM, BLOCK_D)
            k = _gather(key + head_k * k_head, start_k, j, num_k, k_token, HEAD_DIM, BLOCK_D)
            scores, _ = scores_of(
                dot(q, tl.trans(k), None, PRECISION), i[:, None], j[None, :], num_q, num_k,
                bias + row.to(tl.int64) * bias_row + head_long * bias_head,
                (slot_q * bias_q)[:, None], (slot_k * bias_k)[None, :],
                scale, softcap, window_left, window_right, LEFT, RIGHT, SOFTCAP,
            )  # fmt: skip
            p = tl.exp2(scores - stored_exponents(logsumexp + head_long * tokens_q, start_q, i, num_q)[:, None])
            g = _gather(grad_output + head_long * g_head, start_q, i, num_q, g_token, HEAD_DIM_V, BLOCK_V)
            v = _gather(value + head_k * v_head, start_k, j, num_k, v_token, HEAD_DIM_V, BLOCK_V)
            grad_p = dot(g, tl.trans(v), None, PRECISION)
            if drawn_q is not None:
                draws_q = tl.load(drawn_q + head_long * tokens_q + start_q + i, mask=i < num_q, other=0)
                draws_k = tl.load(drawn_k + j, mask=j < num_k, other=0)
                kept = kept_pairs(draws_q[:, None], draws_k[None, :], threshold)
                grad_p = tl.where(kept, grad_p * kept_factor, 0.0)
            deltas = tl.load(delta + head_long * tokens_q + start_q + i, mask=i < num_q, other=0.0)
            total += p * (grad_p - deltas[:, None])
    if SUM_Q:
        total = tl.sum(total, 0, keep_dims=True)
        at_q, length_q = block_q + tl.zeros((1,), tl.int32), num_blocks_q
    else:
        at_q, length_q = slot_q, width_q
    if SUM_K:
        total = tl.sum(total, 1, keep_dims=True)
        at_k, length_k = block_k + tl.zeros((1,), tl.int32), num_blocks_k
    else:
        at_k, length_k = slot_k, width_k
    at = (plane.to(tl.int64) * length_q + at_q[:, None]) * length_k + at_k[None, :]
    tl.store(partial + at, total, mask=(at_q < length_q)[:, None] & (at_k < length_k)[None, :])
