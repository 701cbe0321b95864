"""A kernel that copies many tensors to equally many others in one launch, with a cast, by pointer tables.

Each program moves one block of one tensor. A table of blocks, which depends on the sizes alone, says which one.
Addresses are in another table, which is made anew when they change. Both tables are written into pinned memory and
copied in the order of the stream: the host never waits.

Bytes: with n elements of s bytes in and t bytes out, at least n (s + t). In addition 32 of tables for each program,
which moves `block` elements, and whole 32-byte sectors at the ends of misaligned tensors: 0.1 to 0.6 % for the buckets
of a Llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepytorch.machine_code import Variant
from deepytorch.tuning import fastest, measures_nothing

if TYPE_CHECKING:
    from deepytorch.comm.kernels.buckets import Slots

# (elements of a block, warps). Not measured: 16 elements per thread are four 16-byte loads of fp32 in flight.
SETTINGS = ((4096, 8), (2048, 4), (8192, 8))
_VECTOR_BYTES = 16
_MOST_KEPT = 4  # address tables of one set of slots: allocators reuse the same few addresses
_LARGE_BYTES = 4 << 20  # launch settings for smaller sizes are chosen separately
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _move(
    rows: tl.tensor,
    blocks: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy one block of one tensor.

    rows: int64 (tensors, 3), source, target and size of a tensor. blocks: int32 (programs, 2), the tensor of a program
    and which of its blocks.
    """
    program = tl.program_id(0)
    row = rows + 3 * tl.load(blocks + 2 * program)
    first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    source = tl.load(row).to(tl.pointer_type(SOURCE)) + first
    target = tl.load(row + 1).to(tl.pointer_type(TARGET)) + first
    left = tl.load(row + 2) - first
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:  # without a mask, which would split a load
        tl.store(target + offsets, tl.load(source + offsets).to(tl.float32).to(TARGET))
    else:
        values = tl.load(source + offsets, mask=offsets < left, other=0.0).to(tl.float32)
        tl.store(target + offsets, values.to(TARGET), mask=offsets < left)


@dataclass
class Tables:
    """The tables that stay on the device for one list of sizes.

    blocks: by elements of a block and stream. rows: by stream and addresses. settings: by types and alignment.
    """

    sizes: tuple[int, ...]
    blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    rows: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    settings: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)


def move(gradients: Sequence[Tensor], bucket: Slots) -> None:
    """Write each gradient into its slot, on the current stream.

    gradients: of one dtype and device, dense, of the shapes and strides of the slots.
    """
    device = bucket.views[0].device
    if bucket.tables is None:
        bucket.tables = Tables(tuple(view.numel() for view in bucket.views))
    tables = bucket.tables
    if not any(tables.sizes):
        return
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    addresses = tuple(each.data_ptr() for each in (*gradients, *bucket.views))
    rows = _rows(tables, addresses, stream, device)
    aligned = not any(address % _VECTOR_BYTES for address in addresses)
    kinds = _TYPES[gradients[0].dtype], _TYPES[bucket.views[0].dtype]

    def launch(setting: tuple[int, int]) -> None:
        block, num_warps = setting
        blocks = _blocks(tables, block, stream, device)
        _move[(blocks.shape[0],)](rows, blocks, *kinds, aligned, block, num_warps=num_warps)

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        key = (*kinds, aligned)
        setting = tables.settings.get(key)
        if setting is None:
            size = "large" if sum(tables.sizes) * bucket.views[0].element_size() >= _LARGE_BYTES else "small"
            name = f"{kinds[0]} to {kinds[1]} {size}{' aligned' * aligned}"
            setting = fastest("gradient_buckets/2", name, SETTINGS, launch)
            if not measures_nothing():
                tables.settings[key] = setting
        launch(setting)


def _rows(tables: Tables, addresses: tuple[int, ...], stream: int, device: torch.device) -> Tensor:
    key = (stream, *addresses)
    found = tables.rows.pop(key, None)
    if found is None:
        count = len(tables.sizes)
        found = _to_device(torch.tensor([addresses[:count], addresses[count:], tables.sizes]).t().contiguous(), device)
        while len(tables.rows) >= _MOST_KEPT:
            del tables.rows[next(iter(tables.rows))]
    tables.rows[key] = found  # the most recently used comes last
    return found


def _blocks(tables: Tables, block: int, stream: int, device: torch.device) -> Tensor:
    key = (block, stream)
    if key not in tables.blocks:
        tables.blocks[key] = _to_device(block_table(tables.sizes, block), device)
    return tables.blocks[key]


def block_table(sizes: Sequence[int], block: int) -> Tensor:
    """Return int32 (programs, 2) on the CPU: the tensor of each program, and which of the tensor's blocks it moves."""
    counts = -(-torch.tensor(sizes) // block)
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([tensors, torch.arange(tensors.numel()) - before], dim=1).int().contiguous()


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, made in the order of the current stream.

    The allocator of pinned memory keeps the source until it was read.
    """
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _variants() -> tuple[Variant, ...]:
    names = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    ways = [(source, target, True) for source in names for target in names] + [("bf16", "bf16", False)]
    tables = {"rows": "*i64", "blocks": "*i32"}
    found = []
    for number, (source, target, aligned) in enumerate(ways):
        for block, num_warps in SETTINGS if number == 0 else SETTINGS[:1]:
            constants = {"SOURCE": names[source], "TARGET": names[target], "ALIGNED": aligned, "BLOCK": block}
            signature = {**tables, **dict.fromkeys(constants, "constexpr")}
            label = f"{source} to {target}, {block}{', misaligned' * (not aligned)}"
            found.append(Variant(f"{__name__}:_move", label, signature, constants, num_warps))
    return tuple(found)


VARIANTS = _variants()
