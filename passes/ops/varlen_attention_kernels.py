# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `varlen_attention`; `varlen_attention_triton` launches them and explains the arguments.

Scores of one row's block of queries and block of keys are computed, used and dropped in registers. With `pairs` the
visible pairs of one head, d and v the head dims of keys and values, and heads those of queries, they take

- forward: 2 * heads * pairs * (d + v) flops; it reads queries once, keys and values once for each block of queries
 (mostly from the cache), and writes outputs and 4 bytes per query and head;
- gradient of queries: 2 * heads * pairs * (2 d + v) flops, and the forward's bytes plus output gradients;
- gradients of keys and values: 2 * heads * pairs * (2 d + 2 v) flops; it reads keys and values once, queries and output
 gradients once for each block of keys;
- gradient of the bias: 2 * heads * pairs * (d + v) flops; it reads all four once for each tile;
- sums of outputs times their gradients: 2 * heads * tokens * v flops, both read once.

A bias adds its own bytes for each pair. No kernel uses atomics: the same call gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LN_2 = tl.constexpr(0.6931471805599453)
# Sizes that change from batch to batch: Triton must not recompile a kernel when one of them is 1 or a multiple of 16.
SIZES = [
    "num_blocks", "heads", "group", "tokens_q", "max_k", "window_left", "window_right", "threshold",
    "num_blocks_q", "num_blocks_k", "bias_heads", "bias_rows", "shared_heads", "shared", "shared_each",
    "width_q", "width_k",
]  # fmt: skip


@triton.jit
def dot(x, y, added, PRECISION: tl.constexpr):
    """Return the product of `x` and `y` in float32, plus `added` if that is not None."""
    if INTERPRETED:  # the interpreter would multiply bfloat16 as integers
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, added, input_precision=PRECISION)


@triton.jit
def _place(num_blocks, heads):
    """Return the block, the head and the row of this program."""
    program = tl.program_id(0)
    rest = program // num_blocks
    return program % num_blocks, rest % heads, rest // heads


@triton.jit
def _read(pointer, first, left, stride, DIM: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Load (NUM, BLOCK): `left` tokens from token `first` on with `DIM` numbers each, and zeros."""
    token, dims = tl.arange(0, NUM)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = token < left
    if DIM < BLOCK:
        mask = mask & (dims < DIM)
    return tl.load(pointer + first.to(tl.int64) * stride + token * stride + dims, mask=mask, other=0.0)


@triton.jit
def _write(pointer, x, first, left, stride, DIM: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Store `x` to the places that `_read` loads from."""
    token, dims = tl.arange(0, NUM)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = token < left
    if DIM < BLOCK:
        mask = mask & (dims < DIM)
    at = pointer + first.to(tl.int64) * stride + token * stride + dims
    tl.store(at, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _bias_offset(positions, start, index, num, stride):
    """Return the places, along a dimension of the bias, of tokens `index` of the row that begins at token `start`."""
    if positions is None:
        return index * stride
    else:
        return tl.load(positions + start + index, mask=index < num, other=0).to(tl.int32) * stride


@triton.jit
def _tanh(x):
    """Return tanh of `x`, with the error of a float32 for small `x` too."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.04, near, tl.where(x < 0.0, -far, far))


@triton.jit
def scores_of(
    products, i, j, num_q, num_k, bias, offset_q, offset_k, scale, softcap, window_left, window_right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return scores times log2(e), -inf for hidden pairs, and the tanh of a softcap.

    `i` and `j` are indexes of queries and keys inside the row, one of them a column and the other a row.
    """
    visible = (i < num_q) & (j < num_k)
    if LEFT:
        visible = visible & (j >= i - window_left)
    if RIGHT:
        visible = visible & (j <= i + window_right)
    scores = products * scale
    capped = scores
    if SOFTCAP:
        capped = _tanh(scores / softcap)
        scores = capped * softcap
    if bias is not None:
        scores += tl.load(bias + (offset_q + offset_k), mask=visible, other=0.0).to(tl.float32)
    return tl.where(visible, scores * LOG2_E, float("-inf")), capped


@triton.jit
def _mix64(x):
    """Return the hash of `attention_tile._mix64`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=SIZES)
def draws_kernel(
    seed, cu_seqlens_q, drawn_q, drawn_k, num_blocks, heads, tokens_q, max_k, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the parts of `attention_tile.dropout_factor` that depend on the query alone, and on the key alone.

    `drawn_q` is (heads, tokens_q), `drawn_k` (max_k,), both int32. A call computes the two once: other kernels have no
    registers left for 64-bit products.
    """
    block, head, row = _place(num_blocks, heads)
    index = block * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(cu_seqlens_q + row)
    drawn = _mix64(_mix64(tl.load(seed).to(tl.uint64)) + row.to(tl.uint64))
    drawn = _mix64(drawn + _mix64(head.to(tl.uint64)) * 3 + index.to(tl.uint64)).to(tl.uint32)
    at = drawn_q + head.to(tl.int64) * tokens_q + start + index
    tl.store(at, drawn.to(tl.int32, bitcast=True), mask=index < tl.load(cu_seqlens_q + row + 1) - start)
    if (head == 0) & (row == 0):
        bits = (_mix64(index.to(tl.uint64)) >> 17).to(tl.uint32)
        tl.store(drawn_k + index, bits.to(tl.int32, bitcast=True), mask=index < max_k)


@triton.jit
def kept_pairs(draws_q, draws_k, threshold):
    """Return which pairs dropout keeps."""
    bits = (draws_q ^ draws_k).to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def stored_exponents(logsumexp, start, i, num_q):
    """Return logsumexp times log2(e) for queries `i`.

    For queries that see no key the result is inf, so that their probabilities are 0.
    """
    loaded = tl.load(logsumexp + start + i, mask=i < num_q, other=float("-inf"))
    return tl.where(loaded == float("-inf"), float("inf"), loaded * LOG2_E)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, output, logsumexp,
    cu_seqlens_q, cu_seqlens_k, bias, positions_q, positions_k, drawn_q, drawn_k,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, bias_q, bias_k,
    num_blocks, heads, group, tokens_q, scale, softcap, window_left, window_right, threshold, kept_factor,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one row and head against the keys that they see."""
    block, head, row = _place(num_blocks, heads)
    if RIGHT:
        block = num_blocks - 1 - block  # the last blocks of queries see the most keys, so they start first
    start_q, start_k = tl.load(cu_seqlens_q + row), tl.load(cu_seqlens_k + row)
    num_q, num_k = tl.load(cu_seqlens_q + row + 1) - start_q, tl.load(cu_seqlens_k + row + 1) - start_k
    first = block * BLOCK_Q
    if first >= num_q:
        return
    head_long, head_k = head.to(tl.int64), (head // group).to(tl.int64)
    i = first + tl.arange(0, BLOCK_Q)
    q = _read(query + head_long * q_head, start_q + first, num_q - first, q_token, HEAD_DIM, BLOCK_Q, BLOCK_D)
    offset_q = i
    if bias is not None:
        bias += row.to(tl.int64) * bias_row + head_long * bias_head
        offset_q = _bias_offset(positions_q, start_q, i, num_q, bias_q)
    if drawn_q is not None:
        draws_q = tl.load(drawn_q + head_long * tokens_q + start_q + i, mask=i < num_q, other=0)
    low, high = 0, num_k
    if LEFT:
        low = tl.maximum(first - window_left, 0) // BLOCK_K * BLOCK_K
    if RIGHT:
        high = tl.minimum(num_k, first + BLOCK_Q + window_right)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    summed = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    for begin in range(low, high, BLOCK_K):
        j = begin + tl.arange(0, BLOCK_K)
        k = _read(key + head_k * k_head, start_k + begin, num_k - begin, k_token, HEAD_DIM, BLOCK_K, BLOCK_D)
        offset_k = j
        if bias is not None:
            offset_k = _bias_offset(positions_k, start_k, j, num_k, bias_k)
        products = dot(q, tl.trans(k), None, PRECISION)
        scores, _ = scores_of(
            products, i[:, None], j[None, :], num_q, num_k, bias, offset_q[:, None], offset_k[None, :],
            scale, softcap, window_left, window_right, LEFT, RIGHT, SOFTCAP,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - finite[:, None])
        factor = tl.exp2(top - finite)
        total = total * factor + tl.sum(p, 1)
        if drawn_k is not None:
            draws_k = tl.load(drawn_k + j, mask=j < num_k, other=0)
            p = tl.where(kept_pairs(draws_q[:, None], draws_k[None, :], threshold), p, 0.0)
        v = _read(value + head_k * v_head, start_k + begin, num_k - begin, v_token, HEAD_DIM_V, BLOCK_K, BLOCK_V)
        summed = dot(p.to(v.dtype), v, summed * factor[:, None], PRECISION)
        top = new_top
    empty = total == 0.0
    summed = summed * (kept_factor / tl.where(empty, 1.0, total))[:, None]
    _write(
        output + head_long * HEAD_DIM_V, summed, start_q + first, num_q - first, heads * HEAD_DIM_V,
        HEAD_DIM_V, BLOCK_Q, BLOCK_V,
    )  # fmt: skip
    statistics = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    tl.store(logsumexp + head_long * tokens_q + start_q + i, statistics, mask=i < num_q)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    output, grad_output, delta, g_token, g_head, num_blocks, heads, tokens_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write delta (heads, tokens_q): sums of outputs times their gradients, for all tokens alike."""
    block, head, _ = _place(num_blocks, heads)
    first, head_long = block * BLOCK_Q, head.to(tl.int64)
    o = _read(
        output + head_long * HEAD_DIM_V, first, tokens_q - first, heads * HEAD_DIM_V, HEAD_DIM_V, BLOCK_Q, BLOCK_V
    )
    g = _read(grad_output + head_long * g_head, first, tokens_q - first, g_token, HEAD_DIM_V, BLOCK_Q, BLOCK_V)
    i = first + tl.arange(0, BLOCK_Q)
    sums = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + head_long * tokens_q + i, sums, mask=i < tokens_q)


@triton.jit(do_not_specialize=SIZES)
def grad_query_kernel(
    query, key, value, grad_output, logsumexp, delta, grad_query,
    cu_seqlens_q, cu_seqlens_k, bias, positions_q, positions_k, drawn_q, drawn_k,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, bias_row, bias_head, bias_q, bias_k,
    num_blocks, heads, group, tokens_q, scale, softcap, window_left, window_right, threshold, kept_factor,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries of one row and head."""
    block, head, row = _place(num_blocks, heads)
    if RIGHT:
        block = num_blocks - 1 - block
    start_q, start_k = tl.load(cu_seqlens_q + row), tl.load(cu_seqlens_k + row)
    num_q, num_k = tl.load(cu_seqlens_q + row + 1) - start_q, tl.load(cu_seqlens_k + row + 1) - start_k
    first = block * BLOCK_Q
    if first >= num_q:
        return
    head_long, head_k = head.to(tl.int64), (head // group).to(tl.int64)
    i = first + tl.arange(0, BLOCK_Q)
    q = _read(query + head_long * q_head, start_q + first, num_q - first, q_token, HEAD_DIM, BLOCK_Q, BLOCK_D)
    g = _read(grad_output + head_long * g_head, start_q + first, num_q - first, g_token, HEAD_DIM_V, BLOCK_Q, BLOCK_V)
    exponents = stored_exponents(logsumexp + head_long * tokens_q, start_q, i, num_q)
    deltas = tl.load(delta + head_long * tokens_q + start_q + i, mask=i < num_q, other=0.0)
    offset_q = i
    if bias is not None:
        bias += row.to(tl.int64) * bias_row + head_long * bias_head
        offset_q = _bias_offset(positions_q, start_q, i, num_q, bias_q)
    if drawn_q is not None:
        draws_q = tl.load(drawn_q + head_long * tokens_q + start_q + i, mask=i < num_q, other=0)
    low, high = 0, num_k
    if LEFT:
        low = tl.maximum(first - window_left, 0) // BLOCK_K * BLOCK_K
    if RIGHT:
        high = tl.minimum(num_k, first + BLOCK_Q + window_right)
    grad = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for begin in range(low, high, BLOCK_K):
        j = begin + tl.arange(0, BLOCK_K)
        k = _read(key + head_k * k_head, start_k + begin, num_k - begin, k_token, HEAD_DIM, BLOCK_K, BLOCK_D)
        v = _read(value + head_k * v_head, start_k + begin, num_k - begin, v_token, HEAD_DIM_V, BLOCK_K, BLOCK_V)
        offset_k = j
        if bias is not None:
            offset_k = _bias_offset(positions_k, start_k, j, num_k, bias_k)
        products = dot(q, tl.trans(k), None, PRECISION)
        scores, capped = scores_of(
            products, i[:, None], j[None, :], num_q, num_k, bias, offset_q[:, None], offset_k[None, :],
            scale, softcap, window_left, window_right, LEFT, RIGHT, SOFTCAP,
        )  # fmt: skip
        p = tl.exp2(scores - exponents[:, None])
        grad_p = dot(g, tl.trans(v), None, PRECISION)
        if drawn_k is not None:
            draws_k = tl.load(drawn_k + j, mask=j < num_k, other=0)
            kept = kept_pairs(draws_q[:, None], draws_k[None, :], threshold)
            grad_p = tl.where(kept, grad_p * kept_factor, 0.0)
        grad_scores = p * (grad_p - deltas[:, None])
        if SOFTCAP:
            grad_scores = grad_scores * (1.0 - capped * capped)
        grad = dot(grad_scores.to(k.dtype), k, grad, PRECISION)
    _write(
        grad_query + head_long * HEAD_DIM, grad * scale, start_q + first, num_q - first, heads * HEAD_DIM,
        HEAD_DIM, BLOCK_Q, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def grad_key_value_kernel(
    query, key, value, grad_output, logsumexp, delta, grad_key, grad_value,
    cu_seqlens_q, cu_seqlens_k, bias, positions_q, positions_k, drawn_q, drawn_k,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, bias_row, bias_head, bias_q, bias_k,
    num_blocks, heads, group, tokens_q, scale, softcap, window_left, window_right, threshold, kept_factor,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values of one row, from all query heads that share them.

    `heads` counts those of keys. Scores are (queries, keys) here too, and transposed for the products: values per query
    then take few registers, where a layout of keys by queries spilled.
    """
    block, head_k, row = _place(num_blocks, heads)
    start_q, start_k = tl.load(cu_seqlens_q + row), tl.load(cu_seqlens_k + row)
    num_q, num_k = tl.load(cu_seqlens_q + row + 1) - start_q, tl.load(cu_seqlens_k + row + 1) - start_k
    first = block * BLOCK_K
    if first >= num_k:
        return
    head_k_long = head_k.to(tl.int64)
    j = first + tl.arange(0, BLOCK_K)
    k = _read(key + head_k_long * k_head, start_k + first, num_k - first, k_token, HEAD_DIM, BLOCK_K, BLOCK_D)
    v = _read(value + head_k_long * v_head, start_k + first, num_k - first, v_token, HEAD_DIM_V, BLOCK_K, BLOCK_V)
    offset_k = j
    if bias is not None:
        bias += row.to(tl.int64) * bias_row
        offset_k = _bias_offset(positions_k, start_k, j, num_k, bias_k)
    if drawn_k is not None:
        draws_k = tl.load(drawn_k + j, mask=j < num_k, other=0)
    low, high = 0, num_q
    if RIGHT:
        low = tl.maximum(first - window_right, 0) // BLOCK_Q * BLOCK_Q
    if LEFT:
        high = tl.minimum(num_q, first + BLOCK_K + window_left)
    grad_k = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for member in range(group):
        head = head_k * group + member
        head_long = head.to(tl.int64)
        bias_of_head = bias
        if bias is not None:
            bias_of_head = bias + head_long * bias_head
        for begin in range(low, high, BLOCK_Q):
            i = begin + tl.arange(0, BLOCK_Q)
            q = _read(query + head_long * q_head, start_q + begin, num_q - begin, q_token, HEAD_DIM, BLOCK_Q, BLOCK_D)
            g = _read(
                grad_output + head_long * g_head, start_q + begin, num_q - begin, g_token, HEAD_DIM_V, BLOCK_Q, BLOCK_V
            )
            exponents = stored_exponents(logsumexp + head_long * tokens_q, start_q, i, num_q)
            deltas = tl.load(delta + head_long * tokens_q + start_q + i, mask=i < num_q, other=0.0)
            offset_q = i
            if bias is not None:
                offset_q = _bias_offset(positions_q, start_q, i, num_q, bias_q)
            products = dot(q, tl.trans(k), None, PRECISION)
            scores, capped = scores_of(
                products, i[:, None], j[None, :], num_q, num_k, bias_of_head, offset_q[:, None], offset_k[None, :],
                scale, softcap, window_left, window_right, LEFT, RIGHT, SOFTCAP,
            )  # fmt: skip
            p = tl.exp2(scores - exponents[:, None])
            grad_p = dot(g, tl.trans(v), None, PRECISION)
            kept_p = p
            if drawn_q is not None:
                draws_q = tl.load(drawn_q + head_long * tokens_q + start_q + i, mask=i < num_q, other=0)
                kept = kept_pairs(draws_q[:, None], draws_k[None, :], threshold)
                kept_p = tl.where(kept, p, 0.0)
                grad_p = tl.where(kept, grad_p * kept_factor, 0.0)
            grad_v = dot(tl.trans(kept_p.to(g.dtype)), g, grad_v, PRECISION)
            grad_scores = p * (grad_p - deltas[:, None])
            if SOFTCAP:
                grad_scores = grad_scores * (1.0 - capped * capped)
            grad_k = dot(tl.trans(grad_scores.to(q.dtype)), q, grad_k, PRECISION)
    at, left = start_k + first, num_k - first
    _write(grad_key + head_k_long * HEAD_DIM, grad_k * scale, at, left, heads * HEAD_DIM, HEAD_DIM, BLOCK_K, BLOCK_D)
    _write(
        grad_value + head_k_long * HEAD_DIM_V, grad_v * kept_factor, at, left, heads * HEAD_DIM_V,
        HEAD_DIM_V, BLOCK_K, BLOCK_V,
    )  # fmt: skip
