# mypy: disable-error-code="no-untyped-def"
"""The kernel of `pack_facts`: one program per row, which itself counts the tokens before its row, so that none waits.

The place of a row's tokens depends on the number of tokens in the rows before it. A barrier across the grid would need
all programs to be resident, and a chain of waiting programs can hang. Each program therefore reads all rows before its
own again, out of the cache. This is work of rows^2 / 2: beyond `_ONE_LAUNCH` entries a separate launch counts the rows
first.

Bytes, with n entries, m and l bytes per entry of mask and labels, t tokens, s labels and r rows: n (m + l) read; 2 n of
flags, 8 n of ranks, 8 t + 16 s of indices and 28 r of counts written: 26 n to 50 n for masks and labels of int64. The
rows before are read again: (r - 1) / 2 times n (m + l), from the L2 cache; in two launches n (m + l) once more and 4 r
(r - 1) of counts. Flops: none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepytorch.machine_code import Variant
from deepytorch.passes.ops.pack_facts import Packing, Target

BLOCK, NUM_WARPS = 1024, 4  # not measured: eight entries per thread, two 16-byte loads of bool, four of int64
# Not measured: the last program reads at most this many entries, 256 KB of int64 masks and labels, in a few us.
_ONE_LAUNCH = 16384
_INTEGERS = ["rows", "positions", "mask_row", "target_row", "offset", "num_targets", "ignore_index"]


@triton.jit
def _mask_value(place, inside, HALF: tl.constexpr):
    """Load values of the mask, 0 outside."""
    value = tl.load(place, mask=inside, other=0)
    if HALF:
        value = value.to(tl.float32)
    return value


@triton.jit
def _is_token(value, inside, READING: tl.constexpr):
    """Return 1 for each value that is read as a token, else 0, as int32."""
    if READING == 0:
        found = value != 0
    elif READING == 1:
        found = value == 0
    else:
        found = value >= 0
    return (found & inside).to(tl.int32)


@triton.jit
def _is_labelled(target_ptr, row, column, inside, row_stride, column_stride, offset, num_targets, ignore_index):
    """Return 1 for each label that counts, else 0, as int32."""
    at = column - offset
    inside = inside & (at >= 0) & (at < num_targets)
    place = target_ptr + row.to(tl.int64) * row_stride + at.to(tl.int64) * column_stride
    label = tl.load(place, mask=inside, other=0).to(tl.int64)
    return ((label != ignore_index) & inside).to(tl.int32)


@triton.jit(do_not_specialize=_INTEGERS)
def pack_row(
    mask_ptr,  # (rows, positions)
    target_ptr,  # (rows, num_targets), from position `offset` on; not read without LABELLED
    counts_ptr,  # (6, rows) int32: written, or read if COUNTED
    on_ptr,  # (rows, positions) uint8; written, like all that follow
    labelled_ptr,  # (rows, positions) uint8
    flat_ptr,  # (rows * positions,) int64
    ranks_ptr,  # (rows * positions,) int64
    labelled_flat_ptr,  # (rows * positions,) int64
    labelled_ranks_ptr,  # (rows * positions,) int64
    cu_seqlens_ptr,  # (rows + 1,) int32
    rows,
    positions,
    mask_row,
    mask_column,
    target_row,
    target_column,
    offset,
    num_targets,
    ignore_index,
    READING: tl.constexpr,
    HALF: tl.constexpr,  # the mask is of a floating dtype that is compared in float32
    LABELLED: tl.constexpr,
    COUNTED: tl.constexpr,  # counts were written by an earlier launch
    PLACED: tl.constexpr,  # indices are written; otherwise counts
    BLOCK: tl.constexpr,
):
    """Compute one row: its counts, its part of the indices, its flags."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    before = tl.full([], 0, tl.int32)
    labels_before = tl.full([], 0, tl.int32)
    if COUNTED:
        for start in range(0, row, BLOCK):
            earlier = start + offsets
            before += tl.sum(tl.load(counts_ptr + earlier, mask=earlier < row, other=0))
            if LABELLED:
                labels_before += tl.sum(tl.load(counts_ptr + rows + earlier, mask=earlier < row, other=0))
    elif PLACED:
        for start in range(0, row * positions, BLOCK):
            entry = start + offsets
            earlier, column = entry // positions, entry % positions
            inside = entry < row * positions
            place = mask_ptr + earlier.to(tl.int64) * mask_row + column.to(tl.int64) * mask_column
            before += tl.sum(_is_token(_mask_value(place, inside, HALF), inside, READING))
            if LABELLED:
                labels_before += tl.sum(
                    _is_labelled(
                        target_ptr,
                        earlier,
                        column,
                        inside,
                        target_row,
                        target_column,
                        offset,
                        num_targets,
                        ignore_index,
                    )
                )
    tokens = tl.full([], 0, tl.int32)
    labels = tl.full([], 0, tl.int32)
    stray = tl.full([], 0, tl.int32)
    runs = tl.full([], 0, tl.int32)
    late = tl.full([], 0, tl.int32)
    odd = tl.full([], 0, tl.int32)
    for start in range(0, positions, BLOCK):
        column = start + offsets
        inside = column < positions
        place = mask_ptr + row.to(tl.int64) * mask_row + column.to(tl.int64) * mask_column
        value = _mask_value(place, inside, HALF)
        on = _is_token(value, inside, READING)
        behind = inside & (column > 0)
        begins = on & (1 - _is_token(_mask_value(place - mask_column, behind, HALF), behind, READING))
        entry = row * positions + column
        rank = before + tokens + tl.cumsum(on, 0) - 1
        if PLACED:
            tl.store(flat_ptr + rank, entry.to(tl.int64), mask=on != 0)
            tl.store(ranks_ptr + entry, rank.to(tl.int64), mask=inside)
            tl.store(on_ptr + entry, on.to(tl.uint8), mask=inside)
        if LABELLED:
            counts = _is_labelled(
                target_ptr, row, column, inside, target_row, target_column, offset, num_targets, ignore_index
            )
            if PLACED:
                at = labels_before + labels + tl.cumsum(counts, 0) - 1
                tl.store(labelled_flat_ptr + at, entry.to(tl.int64), mask=counts != 0)
                tl.store(labelled_ranks_ptr + at, rank.to(tl.int64), mask=counts != 0)
                tl.store(labelled_ptr + entry, counts.to(tl.uint8), mask=inside)
            labels += tl.sum(counts)
            stray += tl.sum(counts & (1 - on))
        tokens += tl.sum(on)
        runs += tl.sum(begins)
        late += tl.sum(tl.where(column > 0, begins, 0))
        odd += tl.sum(((value != 0) & (value != 1)).to(tl.int32))
    if not COUNTED:
        tl.store(counts_ptr + row, tokens)
        tl.store(counts_ptr + rows + row, labels)
        tl.store(counts_ptr + 2 * rows + row, stray)
        tl.store(counts_ptr + 3 * rows + row, tl.maximum(runs - 1, 0))
        tl.store(counts_ptr + 4 * rows + row, late)
        tl.store(counts_ptr + 5 * rows + row, odd)
    if PLACED:
        tl.store(cu_seqlens_ptr + row, before)
        tl.store(cu_seqlens_ptr + rows, before + tokens, mask=row == rows - 1)


def launch(mask: Tensor, reading: int, target: Target | None, block: int = BLOCK) -> Packing:
    """Run `pack_facts` on the current stream. reading: the index of one in `pack_facts.READINGS`."""
    rows, positions = mask.shape
    device = mask.device
    on, labelled = (torch.empty(rows, positions, dtype=torch.bool, device=device) for _ in range(2))
    # Each has its own memory: a compiled graph assumes that they are aligned, and would guard on storage offsets.
    flat, ranks, labelled_flat, labelled_ranks = (
        torch.empty(rows * positions, dtype=torch.int64, device=device) for _ in range(4)
    )
    counts = torch.empty(6, rows, dtype=torch.int32, device=device)
    cu_seqlens = torch.empty(rows + 1, dtype=torch.int32, device=device)
    given = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    values = given if target is None else target.values
    flags = (on.view(torch.uint8), labelled.view(torch.uint8))
    written = (counts, *flags, flat, ranks, labelled_flat, labelled_ranks, cu_seqlens)
    strides = (*mask.stride(), *values.stride())
    labels = (0, 0, 0) if target is None else (target.offset, values.size(1), target.ignore_index)
    half = mask.dtype in (torch.float16, torch.bfloat16)
    ways = [(False, True)] if rows * positions <= _ONE_LAUNCH else [(False, False), (True, True)]
    with torch.cuda.device_of(mask):
        for counted, placed in ways:
            how = (reading, half, target is not None, counted, placed, block)
            pack_row[(rows,)](given, values, *written, rows, positions, *strides, *labels, *how, num_warps=NUM_WARPS)
    return Packing(
        on, None if target is None else labelled, counts, flat, ranks, labelled_flat, labelled_ranks, cu_seqlens
    )


def _variants() -> tuple[Variant, ...]:
    names = ("counts", "on", "labelled", "flat", "ranks", "labelled_flat", "labelled_ranks", "cu_seqlens")
    types = ("*i32", "*u8", "*u8", "*i64", "*i64", "*i64", "*i64", "*i32")
    written = {f"{name}_ptr": kind for name, kind in zip(names, types, strict=True)}
    sizes = dict.fromkeys(_INTEGERS, "i32")
    found = []
    for mask, label, labelled, counted, placed in (
        ("*i64", "int64, labels", True, False, True),
        ("*u8", "bool", False, False, True),
        ("*bf16", "bf16, labels", True, False, True),
        ("*i64", "int64, labels, counted only", True, False, False),
        ("*i64", "int64, labels, counted before", True, True, True),
    ):
        constants = {"mask_column": 1, "target_column": 1, "READING": 0, "HALF": mask == "*bf16"}
        constants |= {"LABELLED": labelled, "COUNTED": counted, "PLACED": placed, "BLOCK": BLOCK}
        types_by_name = {"mask_ptr": mask, "target_ptr": "*i64", **written, **sizes}
        signature = {name: types_by_name.get(name, "constexpr") for name in pack_row.arg_names}
        aligned = ("mask_ptr", *written)
        found.append(Variant(f"{__name__}:pack_row", label, signature, constants, NUM_WARPS, aligned=aligned))
    return tuple(found)


VARIANTS = _variants()
