"""`deepytorch::pack_rows` and `unpack_rows`: conversion between padded rows and packed tokens.

Each is the other's backward. As operators they stay whole through autograd, so that the backward of a gather over
distinct indices is a copy instead of an accumulation with atomics. `inline_pack` replaces them for Inductor afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepytorch.passes.ops.library import register
from deepytorch.torch_internals import disable_dynamo, has_triton_package

_PACK = "pack_rows(Tensor x, Tensor indices) -> Tensor"
_UNPACK = "unpack_rows(Tensor x, Tensor indices, SymInt num_rows) -> Tensor"
# Computed, not measured: writing this much takes 5 us at 3 TB/s, as long as two more launches.
_LEAST_BYTES = 16 << 20


def pack_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `x` at `indices`: (num_rows, ...) -> (len(indices), ...), any dtype.

    Args:
        x: (num_rows, ...).
        indices: (tokens,) int64, each in 0 .. num_rows - 1 and all different (the backward copies, it does not add).

    Raises:
        ValueError: `x` has no dimension, or `indices` is not a vector of int64.
    """
    _check("pack_rows", x, indices)
    return torch.ops.deepytorch.pack_rows.default(x, indices)


def unpack_rows(x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """Return zeros with the rows at `indices` set to those of `x`: (len(indices), ...) -> (num_rows, ...), any dtype.

    Raises:
        ValueError: `indices` is not a vector of int64 with one entry for each row of `x`, or `num_rows` is negative.
    """
    _check("unpack_rows", x, indices)
    if x.size(0) != indices.size(0):
        raise ValueError(
            f"unpack_rows: found {x.size(0)} rows and {indices.size(0)} indices; expected one index for each row: "
            "give the indices that these rows were packed with"
        )
    if num_rows < 0:
        raise ValueError(f"unpack_rows: found num_rows {num_rows}; expected the number of padded rows, at least 0")
    return torch.ops.deepytorch.unpack_rows.default(x, indices, num_rows)


def _check(name: str, x: Tensor, indices: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"{name}: found a tensor without dimensions; expected (rows, ...): view it as one row")
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(
            f"{name}: found indices of shape {tuple(indices.shape)} and dtype {indices.dtype}; "
            "expected (tokens,) of int64: take them from mask.flatten().nonzero().flatten()"
        )


def _pack(x: Tensor, indices: Tensor) -> Tensor:
    return x.index_select(0, indices)


def _unpack(x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    if _has_kernels(x.device) and spreads(x, num_rows):
        from deepytorch.passes.ops.pack_triton import spread

        return spread(x, indices.contiguous(), num_rows)
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, indices, x)


def spreads(x: Tensor, num_rows: int) -> bool:
    """Return whether a kernel saves more than its launches take.

    The kernel saves a second write of the tokens, see `pack_triton`.
    """
    fits = x.is_contiguous() and not x.is_complex() and num_rows < 1 << 31 and x.numel() < len(x) << 31
    return fits and x.nbytes >= _LEAST_BYTES


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton_package()


def _pack_fake(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(indices.size(0), *x.shape[1:])


def _unpack_fake(x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _pack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices = inputs
    ctx.save_for_backward(indices)
    ctx.num_rows = x.size(0)


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (indices,) = ctx.saved_tensors
    return torch.ops.deepytorch.unpack_rows.default(grad, indices, ctx.num_rows), None


def _unpack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return torch.ops.deepytorch.pack_rows.default(grad, indices), None, None


# Dynamo is kept out of the kernels when a graph runs.
register(_PACK, {"CompositeExplicitAutograd": disable_dynamo(_pack)}, _pack_fake, _pack_backward, _pack_setup)
register(_UNPACK, {"CompositeExplicitAutograd": disable_dynamo(_unpack)}, _unpack_fake, _unpack_backward, _unpack_setup)
