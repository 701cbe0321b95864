# mypy: disable-error-code="no-untyped-def"
"""Kernels that unpack tokens to padded rows: each padded row is written once, with its token or with zeros.

Zeros that rows are copied into would write the rows with tokens twice. Here every padded row looks up its token
instead, in an inverse of the indices that an earlier launch has written.

Bytes, with t tokens and n padded rows of w bytes: w (n + t), the minimum, and 4 n + 12 t + 4 n for the inverse; zeros
and a copy move w (n + 2 t) and 8 t. Flops: none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepytorch.machine_code import Variant

BLOCK, NUM_WARPS = 1024, 4  # not measured: at two bytes per element, one 16-byte load per thread
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits are moved, whatever their meaning


@triton.jit(do_not_specialize=["tokens"])
def invert_indices(indices_ptr, inverse_ptr, tokens, BLOCK: tl.constexpr):
    """Write inverse (rows,) int32 of indices (tokens,) int64: at each index its token; -1, set before, elsewhere."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    row = tl.load(indices_ptr + token, mask=inside, other=0)
    tl.store(inverse_ptr + row, token, mask=inside)


@triton.jit
def spread_rows(x_ptr, inverse_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Write out (rows, width): the row of x (tokens, width) that inverse names, zeros at -1.

    One program per row and block.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(inverse_ptr + row)
    place = x_ptr + token.to(tl.int64) * width + column
    end = tl.where(token >= 0, width, 0)
    value = tl.load(place, mask=column < end, other=0)
    tl.store(out_ptr + row * width + column, value, mask=column < width)


def spread(x: Tensor, indices: Tensor, num_rows: int, block: int = BLOCK) -> Tensor:
    """Run `unpack_rows` for a contiguous tensor with at least one element, on the current stream."""
    out = torch.empty(num_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    inverse = torch.full((num_rows,), -1, dtype=torch.int32, device=x.device)
    tokens, width = len(x), x[0].numel()
    bits = _OF_SIZE[x.element_size()]
    grid = (num_rows, triton.cdiv(width, block))
    with torch.cuda.device_of(x):
        invert_indices[(triton.cdiv(tokens, block),)](indices, inverse, tokens, block, num_warps=NUM_WARPS)
        spread_rows[grid](x.view(bits), inverse, out.view(bits), width, block, num_warps=NUM_WARPS)
    return out


def _variants() -> tuple[Variant, ...]:
    inverts = {"indices_ptr": "*i64", "inverse_ptr": "*i32", "tokens": "i32", "BLOCK": "constexpr"}
    found = [Variant(f"{__name__}:invert_indices", "", inverts, {"BLOCK": BLOCK}, NUM_WARPS, aligned=("indices_ptr",))]
    for label, kind in (("2 bytes", "*i16"), ("4 bytes", "*i32")):
        spreads = {"x_ptr": kind, "inverse_ptr": "*i32", "out_ptr": kind, "width": "i32", "BLOCK": "constexpr"}
        aligned = ("x_ptr", "out_ptr", "width")
        found.append(Variant(f"{__name__}:spread_rows", label, spreads, {"BLOCK": BLOCK}, NUM_WARPS, aligned=aligned))
    return tuple(found)


VARIANTS = _variants()
