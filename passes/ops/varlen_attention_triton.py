"""The Triton form of `varlen_attention`: every feature of the operator in float32 and half precision, on NVIDIA GPUs.

The form never waits for the device: the grid follows from the longest row and the number of rows, and programs beyond
the end of their row return at once. The kernels, with their flops and bytes, are in `varlen_attention_kernels` and
`varlen_attention_bias_kernel`. Dropout draws the same as `attention_tile.dropout_factor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepytorch.machine_code import Variant
from deepytorch.passes.ops.attention_tile import NEGATIVE_INFINITY, Call, Gradients, Saved, inner_adjacent
from deepytorch.passes.ops.varlen_attention_bias_kernel import grad_bias_kernel
from deepytorch.passes.ops.varlen_attention_dense import laid_out
from deepytorch.passes.ops.varlen_attention_kernels import (
    delta_kernel,
    draws_kernel,
    forward_kernel,
    grad_key_value_kernel,
    grad_query_kernel,
)
from deepytorch.tuning import fastest

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_HALF_HEAD_DIM = 128  # beyond it, some of the tiles that are tried gave wrong gradients of keys on an H100
_MOST_OFFSET = 2**31 - 1
_NO_LIMIT = 1 << 30  # wider windows hide nothing, and would overflow in a kernel
_DELTA_TOKENS = 32
_DRAWN = 256
_BIAS_PROGRAMS = 1024  # of the bias gradient at least, if its sums can be cut so: several per multiprocessor
_MODULE = "deepytorch.passes.ops.varlen_attention_"


class Tiles(NamedTuple):
    """One launch setting: queries and keys of a tile, warps of a program, stages of its loop."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By kernel, precision, and the largest padded head dim they apply to. The first of each list compiles for sm_80, sm_90
# and sm_100 without spilling (VARIANTS). They are not measured on a GPU yet: otherwise the order is a guess.
_TILES: dict[tuple[str, str, int], tuple[Tiles, ...]] = {
    ("forward", "half", 64): (
        Tiles(64, 64, 8, 2),
        Tiles(64, 64, 4, 2),
        Tiles(128, 64, 8, 2),
        Tiles(128, 128, 8, 2),
    ),
    ("forward", "half", 128): (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    ("forward", "half", 256): (Tiles(64, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2)),
    ("forward", "full", 64): (Tiles(32, 16, 8, 1), Tiles(32, 16, 4, 1), Tiles(32, 32, 4, 1), Tiles(64, 32, 8, 1)),
    ("forward", "full", 128): (Tiles(32, 16, 8, 1), Tiles(32, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("forward", "full", 256): (Tiles(32, 32, 16, 1), Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1)),
    ("query", "half", 64): (Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2)),
    ("query", "half", 128): (Tiles(64, 32, 4, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2)),
    ("query", "half", 256): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(128, 32, 8, 1)),
    ("query", "full", 64): (Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("query", "full", 128): (Tiles(16, 32, 8, 1), Tiles(32, 16, 8, 1), Tiles(32, 32, 8, 1)),
    ("query", "full", 256): (Tiles(16, 16, 4, 2), Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 32, 16, 1)),
    ("key_value", "half", 64): (Tiles(64, 32, 4, 1), Tiles(32, 64, 4, 1), Tiles(32, 64, 4, 2), Tiles(64, 64, 8, 2)),
    ("key_value", "half", 128): (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 128, 8, 2)),
    ("key_value", "half", 256): (Tiles(16, 64, 8, 1), Tiles(32, 64, 8, 1), Tiles(32, 64, 8, 2)),
    ("key_value", "full", 64): (Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1)),
    ("key_value", "full", 128): (Tiles(32, 16, 16, 1), Tiles(16, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1)),
    ("key_value", "full", 256): (Tiles(16, 16, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 4, 1)),
    ("bias", "half", 64): (Tiles(64, 32, 4, 1),),
    ("bias", "half", 128): (Tiles(64, 16, 8, 1),),
    ("bias", "half", 256): (Tiles(64, 16, 8, 1),),
    ("bias", "full", 64): (Tiles(32, 16, 4, 1),),
    ("bias", "full", 128): (Tiles(32, 16, 8, 1),),
    ("bias", "full", 256): (Tiles(16, 16, 8, 1),),
}


def why_not_triton(query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
    """Return the reason why these kernels cannot compute a call, or None if they can. The caller checks the device."""
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value of dtypes {query.dtype}, {key.dtype} and {value.dtype}"
    if max(query.size(2), value.size(2)) > _MAX_HEAD_DIM or 0 in (query.size(2), value.size(2)):
        return f"head_dim {query.size(2)} of keys and {value.size(2)} of values"
    if query.dtype != torch.float32 and max(query.size(2), value.size(2)) > _MAX_HALF_HEAD_DIM:
        return f"heads of {query.size(2)} and {value.size(2)} in {query.dtype}"
    if call.bias is not None:
        if call.bias.dtype not in _DTYPES:
            return f"a bias of dtype {call.bias.dtype}"
        if sum((call.bias.size(dim) - 1) * call.bias.stride(dim) for dim in (2, 3)) > _MOST_OFFSET:
            return f"a bias of shape {tuple(call.bias.shape)} whose offsets take 64 bits"
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """Return output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q).

    tiles: used instead of the tuned ones.
    """
    query, key, value = (inner_adjacent(x) for x in (query, key, value))
    heads, rows = query.size(1), call.cu_seqlens_q.size(0) - 1
    output = query.new_zeros(query.size(0), heads, value.size(2))
    logsumexp = query.new_full((heads, query.size(0)), NEGATIVE_INFINITY, dtype=torch.float32)
    if _nothing_seen(query, key, call):
        return output, logsumexp
    shared, constants = _shared_arguments(query, call), _constants(query, value, call)

    def launch(tiles: Tiles) -> None:
        blocks = -(-call.max_q // tiles.queries)
        forward_kernel[(blocks * heads * rows,)](
            query, key, value, output, logsumexp, **shared, **_strides(q=query, k=key, v=value),
            num_blocks=blocks, heads=heads, group=heads // key.size(1), tokens_q=query.size(0),
            **constants, **_launch_options(tiles),
        )  # fmt: skip

    with torch.cuda.device_of(query):
        launch(tiles or _tuned("forward", query, value, call, launch))
    return output, logsumexp


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool, tiles: Tiles | None = None) -> Gradients:
    """Return the gradients of one call. tiles: used instead of the tuned ones."""
    call = saved.call
    grad_output, query, key, value = (inner_adjacent(x) for x in (grad_output, *saved[:3]))
    output, logsumexp = saved.output.contiguous(), saved.logsumexp.contiguous()
    (tokens_q, heads, _), (heads_k, dim_v), rows = query.shape, value.shape[1:], call.cu_seqlens_q.size(0) - 1
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    grad_bias = query.new_empty(0)
    if bias_gradient:
        assert call.bias is not None
        grad_bias = torch.zeros(call.bias.shape, dtype=call.bias.dtype, device=call.bias.device)
    if _nothing_seen(query, key, call):
        return grads[0], grads[1], grads[2], grad_bias
    delta = torch.empty_like(logsumexp)
    tensors = (query, key, value, grad_output, logsumexp, delta)
    shared, constants = _shared_arguments(query, call), _constants(query, value, call)
    sizes: dict[str, Any] = {
        **_strides(q=query, k=key, v=value, g=grad_output), "group": heads // heads_k, "tokens_q": tokens_q,
    }  # fmt: skip

    def launch_query(tiles: Tiles) -> None:
        blocks = -(-call.max_q // tiles.queries)
        grad_query_kernel[(blocks * heads * rows,)](
            *tensors, grads[0], **shared, **sizes, num_blocks=blocks, heads=heads, **constants, **_launch_options(tiles)
        )

    def launch_key_value(tiles: Tiles) -> None:
        blocks = -(-call.max_k // tiles.keys)
        grad_key_value_kernel[(blocks * heads_k * rows,)](
            *tensors, grads[1], grads[2], **shared, **sizes, num_blocks=blocks, heads=heads_k, **constants,
            **_launch_options(tiles),
        )  # fmt: skip

    with torch.cuda.device_of(query):
        blocks = -(-tokens_q // _DELTA_TOKENS)
        delta_kernel[(blocks * heads,)](
            output, grad_output, delta, grad_output.stride(0), grad_output.stride(1), blocks, heads, tokens_q,
            HEAD_DIM_V=dim_v, BLOCK_V=constants["BLOCK_V"], BLOCK_Q=_DELTA_TOKENS,
        )  # fmt: skip
        launch_query(tiles or _tuned("query", query, value, call, launch_query))
        launch_key_value(tiles or _tuned("key_value", query, value, call, launch_key_value))
        if bias_gradient:
            chosen = tiles or _listed("bias", query, value)[0]
            grad_bias = _grad_bias(tensors, call, {**shared, **sizes, **constants}, chosen)
    return grads[0], grads[1], grads[2], grad_bias


def _grad_bias(tensors: Sequence[Tensor], call: Call, arguments: dict[str, Any], tiles: Tiles) -> Tensor:
    """Return the gradient of the bias, in its shape and dtype: partial sums of tiles, then their sum."""
    query, key, bias = tensors[0], tensors[1], call.bias
    assert bias is not None
    heads, rows = query.size(1), call.cu_seqlens_q.size(0) - 1
    bias_rows, bias_heads, *_ = bias.shape
    shared_rows, shared_heads = (whole if part == 1 else 1 for whole, part in ((rows, bias_rows), (heads, bias_heads)))
    sums, widths, blocks, indexes = [], [], [], []
    for dim, x, cumulative, longest, positions, block in (
        (2, query, call.cu_seqlens_q, call.max_q, call.positions_q, tiles.queries),
        (3, key, call.cu_seqlens_k, call.max_k, call.positions_k, tiles.keys),
    ):
        sums.append(bias.size(dim) == 1)
        widths.append(longest if sums[-1] else bias.size(dim))
        blocks.append(-(-widths[-1] // block))
        mapped = positions is not None and not sums[-1]
        indexes.append(laid_out(x.size(0), cumulative, widths[-1], positions).row_index if mapped else None)
    shared = shared_rows * shared_heads
    planes = bias_rows * bias_heads
    each = -(-shared // max(1, min(shared, _BIAS_PROGRAMS // (planes * blocks[0] * blocks[1]))))
    parts = -(-shared // each)
    lengths = [count if summed else width for count, summed, width in zip(blocks, sums, widths, strict=True)]
    partial = torch.empty(parts, bias_rows, bias_heads, *lengths, dtype=torch.float32, device=bias.device)
    del arguments["positions_q"], arguments["positions_k"]
    grad_bias_kernel[(parts * planes * blocks[0] * blocks[1],)](
        *tensors, partial, indexes_q=indexes[0], indexes_k=indexes[1],
        num_blocks_q=blocks[0], num_blocks_k=blocks[1], bias_heads=bias_heads, bias_rows=bias_rows,
        shared_heads=shared_heads, shared=shared, shared_each=each, width_q=widths[0], width_k=widths[1],
        SUM_Q=sums[0], SUM_K=sums[1], **arguments, **_launch_options(tiles),
    )  # fmt: skip
    for dim, summed in ((3, sums[0]), (4, sums[1])):
        if summed:
            partial = partial.sum(dim, keepdim=True)
    return (partial.sum(0) if parts > 1 else partial[0]).to(bias.dtype)


def _nothing_seen(query: Tensor, key: Tensor, call: Call) -> bool:
    sizes = (query.size(0), query.size(1), key.size(0), call.max_q, call.max_k, call.cu_seqlens_q.size(0) - 1)
    return 0 in sizes


def _shared_arguments(query: Tensor, call: Call) -> dict[str, Any]:
    """Return the arguments that all kernels take besides tensors of tokens, by name; None for absent ones."""
    rule, bias = call.rule, call.bias
    steps = (0,) * 4 if bias is None else tuple(0 if bias.size(dim) == 1 else bias.stride(dim) for dim in range(4))
    drawn_q, drawn_k = _draws(query, call)
    return {
        "cu_seqlens_q": call.cu_seqlens_q.contiguous(),
        "cu_seqlens_k": call.cu_seqlens_k.contiguous(),
        "bias": bias,
        "positions_q": _places(call.positions_q, bias, 2),
        "positions_k": _places(call.positions_k, bias, 3),
        "drawn_q": drawn_q,
        "drawn_k": drawn_k,
        **dict(zip(("bias_row", "bias_head", "bias_q", "bias_k"), steps, strict=True)),
        "scale": rule.scale,
        "softcap": rule.softcap,
        "window_left": min(rule.window_left, _NO_LIMIT),
        "window_right": min(rule.window_right, _NO_LIMIT),
        "threshold": min(round(rule.dropout_p * 2**32), 2**32 - 1) - 2**31,
        "kept_factor": 1.0 / (1.0 - rule.dropout_p),
    }


def _places(positions: Tensor | None, bias: Tensor | None, dim: int) -> Tensor | None:
    """Return the positions along a dimension of the bias, or None if the dimension has one place only."""
    return None if positions is None or bias is None or bias.size(dim) == 1 else positions.contiguous()


def _draws(query: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the hashes that decide dropout, (heads, tokens_q) and (max_k,), int32; the backward computes the same."""
    if call.rule.dropout_p == 0:
        return None, None
    assert call.seed is not None
    drawn_q = query.new_empty(query.size(1), query.size(0), dtype=torch.int32)
    drawn_k = query.new_empty(call.max_k, dtype=torch.int32)
    blocks = -(-max(call.max_q, call.max_k) // _DRAWN)
    with torch.cuda.device_of(query):
        draws_kernel[(blocks * query.size(1) * (call.cu_seqlens_q.size(0) - 1),)](
            call.seed,
            call.cu_seqlens_q.contiguous(),
            drawn_q,
            drawn_k,
            blocks,
            query.size(1),
            query.size(0),
            call.max_k,
            BLOCK=_DRAWN,
        )
    return drawn_q, drawn_k


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of tokens and heads, by the names that the kernels give them."""
    return {
        f"{name}_{what}": x.stride(dim) for name, x in tensors.items() for dim, what in enumerate(("token", "head"))
    }


def _constants(query: Tensor, value: Tensor, call: Call) -> dict[str, Any]:
    rule = call.rule
    return _dims(query.size(2), value.size(2)) | {
        "LEFT": rule.window_left >= 0,
        "RIGHT": rule.window_right >= 0,
        "SOFTCAP": rule.softcap > 0,
        "PRECISION": _precision(query),
    }


def _precision(query: Tensor) -> str:
    """Return the precision of float32 products that torch is configured for."""
    tf32 = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def _dims(head_dim: int, head_dim_v: int) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_V": _padded(head_dim_v),
    }


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _launch_options(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _listed(kernel: str, query: Tensor, value: Tensor) -> tuple[Tiles, ...]:
    block = max(64, _padded(max(query.size(2), value.size(2))))
    return _TILES[kernel, "full" if query.dtype == torch.float32 else "half", block]


def _tuned(kernel: str, query: Tensor, value: Tensor, call: Call, launch: Callable[[Tiles], object]) -> Tiles:
    rule = call.rule
    features = {
        "left": rule.window_left >= 0,
        "right": rule.window_right >= 0,
        "bias": call.bias is not None,
        "dropout": rule.dropout_p > 0,
        "softcap": rule.softcap > 0,
        "long": call.max_k > 512,
    }
    names = " ".join(name for name, given in features.items() if given)
    precision = _precision(query) if query.dtype == torch.float32 else ""
    shape_class = f"{query.dtype} {precision} {_padded(query.size(2))} {_padded(value.size(2))} {names}"
    return fastest(f"varlen_attention_{kernel}/1", shape_class, _listed(kernel, query, value), launch)


_OF_TOKENS = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
_IN_FLOAT32 = ("logsumexp", "delta", "partial", "bias")
_PLACES = ("positions_q", "positions_k", "indexes_q", "indexes_k")
_PLAIN, _CAUSAL, _WINDOW, _BIASED = (
    frozenset(each.split()) for each in ("", "right", "left right softcap", "right bias dropout")
)
_ARGUMENTS = {
    "forward": (f"{_MODULE}kernels:forward_kernel", forward_kernel),
    "query": (f"{_MODULE}kernels:grad_query_kernel", grad_query_kernel),
    "key_value": (f"{_MODULE}kernels:grad_key_value_kernel", grad_key_value_kernel),
    "bias": (f"{_MODULE}bias_kernel:grad_bias_kernel", grad_bias_kernel),
}


def variant(kernel: str, dtype: str, head_dim: int, features: frozenset[str], tiles: Tiles) -> Variant:
    """Return one way to launch a kernel of `_ARGUMENTS`.

    features: of "left", "right", "bias", "dropout" and "softcap".
    """
    name, function = _ARGUMENTS[kernel]
    constants = _dims(head_dim, head_dim) | {
        "BLOCK_Q": tiles.queries, "BLOCK_K": tiles.keys, "LEFT": "left" in features, "RIGHT": "right" in features,
        "SOFTCAP": "softcap" in features, "PRECISION": "ieee",
    }  # fmt: skip
    if kernel == "bias":
        constants |= {"SUM_Q": False, "SUM_K": False}
    constants |= {each: None for each in _PLACES if each in function.arg_names}
    if "dropout" not in features:
        constants |= {"drawn_q": None, "drawn_k": None}
    constants |= {"bias_k": 1} if "bias" in features else {"bias": None}  # a bias is usually not transposed in memory
    signature = {each: "constexpr" if each in constants else _type_of(each, dtype) for each in function.arg_names}
    aligned = tuple(
        each for each, kind in signature.items()
        if kind.startswith("*") or each.endswith(("_token", "_head")) or each in ("bias_row", "bias_q")
    )  # fmt: skip
    label = f"{dtype}, head {head_dim}, {' '.join(sorted(features)) or 'plain'}"
    return Variant(name, label, signature, constants, tiles.num_warps, tiles.num_stages, dtype != "fp32", aligned)


def _type_of(argument: str, dtype: str) -> str:
    """Return the type of an argument as Triton spells it, for tokens of `dtype` and a bias in float32."""
    if argument in _OF_TOKENS:
        return f"*{dtype}"
    if argument in _IN_FLOAT32:
        return "*fp32"
    if argument.startswith(("cu_", "drawn_")):
        return "*i32"
    return "fp32" if argument in ("scale", "softcap", "kept_factor") else "i32"


def _variants() -> tuple[Variant, ...]:
    found = []
    for (kernel, precision, head_dim), tiles in _TILES.items():
        dtype = "bf16" if precision == "half" else "fp32"
        cases = [(dtype, each) for each in ((_BIASED,) if kernel == "bias" else (_CAUSAL, _WINDOW, _BIASED))]
        if precision == "half" and head_dim == 128 and kernel != "bias":
            cases += [("fp16", _PLAIN)]
        found += [variant(kernel, each, head_dim, features, tiles[0]) for each, features in cases]
    return tuple(found)


VARIANTS = _variants()
