"""All-reduce over memory that the GPUs of a host map for each other, in one launch: one-shot and two-shot.

Each rank has a buffer that all others read: flags, then two halves for values. A call copies its values into one half,
tells all other ranks, waits until they have said the same, and reads theirs. The next call uses the other half; when
the flags of that call have arrived, all ranks have finished this one, so that no call waits at its end. Values are
added up in the order of the ranks, in float32, and rounded once: every rank gets the same bits, from either form.

Program p of a rank waits for program p of the other ranks only: all ranks assign tiles to programs alike. The grid is
therefore the same in every call and on every rank, and no rank may measure a launch setting for itself. The number of
calls is kept on the device, so that a CUDA graph may replay them.

Bytes of each rank, of n with w ranks: one-shot copies n, reads n of its own and n (w - 1) of others, and writes n;
two-shot copies n, reads n (w - 1) / w of others twice and n (1 + 2 / w) of its own, and writes n (1 + 1 / w). Flags
come in addition. Flops: n w in one-shot, n in two-shot.

A rank whose peers never arrive waits forever, as with NCCL's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepytorch.machine_code import Variant

MOST_RANKS = 8
PROGRAMS = 32  # the maximum of torch's own kernels; a GPU must be able to hold all of them at once
HEAD_BYTES = 4 * PROGRAMS * MOST_RANKS  # size of the flags, before the halves
VECTOR_BYTES = 16
_TILE_BYTES, _WARPS = 8192, 16  # one 16-byte vector per thread, from each rank. Not measured.
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES = frozenset(_TYPES)


@triton.jit
def _meet(buffers: tl.tensor, epoch: tl.tensor, rank: tl.tensor, WORLD: tl.constexpr, LANES: tl.constexpr) -> None:
    """Tell this program of all ranks how far this rank has come, and wait until they have come as far."""
    tl.debug_barrier()  # all threads' stores come before the store of the flag
    place = tl.program_id(0) * WORLD
    lanes = tl.arange(0, LANES)
    inside = lanes < WORLD
    theirs = tl.load(buffers + lanes, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + place + rank, epoch, mask=inside, sem="release", scope="sys")
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.int32)) + place + lanes
    behind = 1
    while behind > 0:  # compares by difference, which stays small when counts wrap around
        seen = tl.atomic_add(mine, 0, mask=inside, sem="acquire", scope="sys")
        behind = tl.max(tl.where(inside, epoch - seen, 0))
    tl.debug_barrier()  # no thread reads before all flags are there


@triton.jit
def _values_of(
    buffers: tl.tensor,
    rank: tl.tensor,
    half: tl.tensor,
    num_vectors: tl.tensor,
    HEAD: tl.constexpr,
    VECTOR: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Return where a half of a rank's buffer begins."""
    start = tl.load(buffers + rank).to(tl.pointer_type(TYPE)) + HEAD + half.to(tl.int64) * num_vectors * VECTOR
    return tl.multiple_of(start, 16)


_SIZES = ["num_vectors", "half_vectors", "rank"]  # not specialised: one kernel for all values


@triton.jit(do_not_specialize=_SIZES)
def _one_shot(
    values: tl.tensor,
    buffers: tl.tensor,
    calls: tl.tensor,
    num_vectors: tl.tensor,
    half_vectors: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    AVERAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
) -> None:
    """Reduce all values on every rank.

    values: (num_vectors * VECTOR,), in place. buffers: int64 (WORLD,). calls: int32 (PROGRAMS,).
    """
    program = tl.program_id(0)
    call = tl.load(calls + program)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
    num = num_vectors * VECTOR
    mine = _values_of(buffers, rank, call & 1, half_vectors, HEAD, VECTOR, TYPE)
    for first in range(program * BLOCK, num, PROGRAMS * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(mine + offsets, tl.load(values + offsets, mask=offsets < num), mask=offsets < num)
    if BARRIER:
        _meet(buffers, 2 * call + 2, rank, WORLD, LANES)
    for first in range(program * BLOCK, num, PROGRAMS * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total = _sum(buffers, call & 1, half_vectors, offsets, offsets < num, WORLD, TYPE, VECTOR, AVERAGE, HEAD)
        tl.store(values + offsets, total, mask=offsets < num)
    if BARRIER:
        tl.store(calls + program, call + 1)


@triton.jit(do_not_specialize=_SIZES)
def _two_shot(
    values: tl.tensor,
    buffers: tl.tensor,
    calls: tl.tensor,
    num_vectors: tl.tensor,
    half_vectors: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    AVERAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
) -> None:
    """Reduce one slice per rank, then collect the slices; arguments as for `_one_shot`.

    A rank adds up its slice in its own buffer, whose slice only that rank has read before.
    """
    program = tl.program_id(0)
    call = tl.load(calls + program)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
    part = tl.cdiv(num_vectors, WORLD)
    mine = _values_of(buffers, rank, call & 1, half_vectors, HEAD, VECTOR, TYPE)
    for owner in range(WORLD):
        base = owner * part * VECTOR
        num = tl.minimum(part, tl.maximum(num_vectors - owner * part, 0)) * VECTOR
        for first in range(program * BLOCK, num, PROGRAMS * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            copied = tl.load(values + base + offsets, mask=offsets < num)
            tl.store(mine + base + offsets, copied, mask=offsets < num)
    if BARRIER:
        _meet(buffers, 2 * call + 1, rank, WORLD, LANES)
    base = rank * part * VECTOR
    num = tl.minimum(part, tl.maximum(num_vectors - rank * part, 0)) * VECTOR
    for first in range(program * BLOCK, num, PROGRAMS * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total = _sum(buffers, call & 1, half_vectors, base + offsets, offsets < num, WORLD, TYPE, VECTOR, AVERAGE, HEAD)
        tl.store(mine + base + offsets, total, mask=offsets < num)
    if BARRIER:
        _meet(buffers, 2 * call + 2, rank, WORLD, LANES)
    for owner in range(WORLD):
        theirs = _values_of(buffers, owner, call & 1, half_vectors, HEAD, VECTOR, TYPE)
        base = owner * part * VECTOR
        num = tl.minimum(part, tl.maximum(num_vectors - owner * part, 0)) * VECTOR
        for first in range(program * BLOCK, num, PROGRAMS * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            reduced = tl.load(theirs + base + offsets, mask=offsets < num, cache_modifier=".cg")
            tl.store(values + base + offsets, reduced, mask=offsets < num)
    if BARRIER:
        tl.store(calls + program, call + 1)


@triton.jit
def _sum(
    buffers: tl.tensor,
    half: tl.tensor,
    half_vectors: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    WORLD: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    AVERAGE: tl.constexpr,
    HEAD: tl.constexpr,
) -> tl.tensor:
    """Return the sum or average of all ranks' values at `offsets`, bypassing caches that do not see others' writes."""
    theirs = _values_of(buffers, 0, half, half_vectors, HEAD, VECTOR, TYPE)
    total = tl.load(theirs + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for peer in tl.static_range(1, WORLD):
        theirs = _values_of(buffers, peer, half, half_vectors, HEAD, VECTOR, TYPE)
        total += tl.load(theirs + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if AVERAGE:
        total = tl.div_rn(total, WORLD * 1.0)
    return total.to(TYPE)


def half_bytes(num_bytes: int) -> int:
    """Return the size of one half of a buffer for a payload: a power of two, so that few different sizes are made."""
    return max(1 << 16, 1 << (num_bytes - 1).bit_length())


def buffer_bytes(half: int) -> int:
    """Return the size of a buffer: flags and two halves of `half` bytes each."""
    return HEAD_BYTES + 2 * half


def all_reduce(
    tensor: Tensor, buffers: Tensor, calls: Tensor, half: int, rank: int, *, two_shot: bool, average: bool,
    barrier: bool = True,
) -> None:  # fmt: skip
    """Add up `tensor` in place over the ranks, on the current stream; every rank calls it with the same arguments.

    Args:
        tensor: contiguous, of `DTYPES`, a multiple of `VECTOR_BYTES` long, at most `half`.
        buffers: int64 (ranks,) on the device: the address of each rank's buffer of `buffer_bytes(half)` in this
            device's mapping. Flags are zero before the first call, on all ranks.
        calls: int32 (PROGRAMS,) on the device, zeros before the first call; used by this stream only.
        half: bytes of a half.
        rank: the place of this rank in `buffers`.
        two_shot: whether each rank adds up only a slice; else everything.
        average: whether the sum is divided by the number of ranks, before it is rounded.
        barrier: False runs without waiting for others, in the interpreter.
    """
    world_size, vector = buffers.numel(), VECTOR_BYTES // tensor.element_size()
    assert tensor.nbytes % VECTOR_BYTES == 0, "whole vectors"
    assert tensor.nbytes <= half, "payloads fit"
    aligned = tensor.data_ptr() % VECTOR_BYTES == 0
    kernel: Any = _two_shot if two_shot else _one_shot
    kernel[(PROGRAMS,)](
        tensor, buffers, calls, tensor.nbytes // VECTOR_BYTES, half // VECTOR_BYTES, rank,
        num_warps=_WARPS, **_constants(_TYPES[tensor.dtype], vector, world_size, average, aligned, barrier),
    )  # fmt: skip


def _constants(kind: Any, vector: int, world_size: int, average: bool, aligned: bool, barrier: bool) -> dict[str, Any]:
    return {
        "WORLD": world_size,
        "LANES": triton.next_power_of_2(world_size),
        "TYPE": kind,
        "VECTOR": vector,
        "AVERAGE": average,
        "ALIGNED": aligned,
        "BARRIER": barrier,
        "BLOCK": _TILE_BYTES * vector // VECTOR_BYTES,
        "PROGRAMS": PROGRAMS,
        "HEAD": HEAD_BYTES * vector // VECTOR_BYTES,
    }


def _variants() -> tuple[Variant, ...]:
    ways = [
        ("fp32", 2, False, True), ("fp32", 8, True, True), ("bf16", 8, True, True), ("bf16", 3, True, True),
        ("bf16", 4, False, False), ("fp16", 8, False, True),
    ]  # fmt: skip
    kinds = {"fp32": (tl.float32, 4), "bf16": (tl.bfloat16, 8), "fp16": (tl.float16, 8)}
    sizes = {"num_vectors": "i32", "half_vectors": "i32", "rank": "i32"}
    found = []
    for name, world_size, average, aligned in ways:
        constants = _constants(*kinds[name], world_size, average, aligned, True)
        pointers = {"values": f"*{name}", "buffers": "*i64", "calls": "*i32"}
        signature = {**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}
        label = f"{name}, {world_size} ranks, {'avg' if average else 'sum'}{', misaligned' * (not aligned)}"
        for kernel in ("_one_shot", "_two_shot"):
            found.append(Variant(f"{__name__}:{kernel}", label, signature, constants, _WARPS))
    return tuple(found)


VARIANTS = _variants()
