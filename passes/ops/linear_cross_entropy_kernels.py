# mypy: disable-error-code="no-untyped-def"
"""Kernels of `linear_cross_entropy_triton`, their launch settings, and the variants that are compiled to check them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepytorch.machine_code import Variant

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # the start of a maximum: unlike -inf it can be subtracted from -inf


class Tile(NamedTuple):
    """The tile sizes and launch options of `product`."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


class Setting(NamedTuple):
    """The launch setting of the sweep.

    block: classes of a row handled at a time; tile: None for the library's products.
    """

    block: int
    num_warps: int
    tile: Tile | None


# Guesses: none is measured yet. The first is used where nothing can be measured. Blocks are 8 or 16 elements a thread:
# ptxas spills some of 4096 elements over 8 warps. Tiles of 128 x 256 x 64 spill on sm_80.
SETTINGS = (
    Setting(4096, 16, None),
    Setting(2048, 4, None),
    Setting(4096, 16, Tile(128, 256, 32, 8, 4)),
    Setting(4096, 16, Tile(128, 128, 64, 8, 3)),
)
FLOAT32 = Tile(128, 128, 64, 8, 3)  # wider tiles spill where they write or add to float32


@triton.jit
def _logits_of(place, bias_place, inside, softcap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr):
    """Load logits in fp32, -inf outside, and the derivative of the softcap."""
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_place, mask=inside, other=0.0).to(tl.float32)
    slope = x
    if CAPPED:
        small = tl.exp(-2.0 * tl.abs(x) / softcap)
        tanh = tl.where(x < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
        slope = 1.0 - tanh * tanh
        x = tl.where(inside, tanh * softcap, float("-inf"))
    return x, slope


@triton.jit
def _row_begin(logits_ptr, last_ptr, piece, num_pieces, row, piece_classes, piece_stride, last_stride):
    """Return where a row's logits of a piece begin."""
    begin = logits_ptr + tl.cast(piece, tl.int64) * piece_stride + row * piece_classes
    return tl.where(piece == num_pieces - 1, last_ptr + row * last_stride, begin)


@triton.jit
def softmax_rows(
    logits_ptr,  # pieces of (rows, piece_classes), piece_stride apart
    last_ptr,  # the last piece, its rows last_stride apart
    bias_ptr,  # (classes,)
    target_ptr,  # (rows,) int64, negative where ignored
    factor_ptr,  # (rows,) fp32: the factor of the cross-entropy's gradient
    z_factor_ptr,  # (rows,) fp32: likewise for logsumexp ** 2
    count_ptr,  # () int64: the number of rows that count
    loss_ptr,  # (rows,) fp32, written
    logsumexp_ptr,  # (rows,) fp32, written, or read where KNOWN
    classes,
    piece_classes,
    piece_stride,
    last_stride,
    keep,  # 1 - label_smoothing
    spread,  # label_smoothing / all classes
    softcap,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    Z: tl.constexpr,
    ORDERED: tl.constexpr,  # rows that count come first; there are count_ptr of them
    KNOWN: tl.constexpr,  # logsumexp is known
    GRADIENTS: tl.constexpr,  # gradients are written over the logits
    BLOCK: tl.constexpr,
):
    """Compute the cross-entropy, logsumexp and the gradient of the logits of one row. One program per row."""
    row = tl.program_id(0)
    if ORDERED:  # noqa: SIM102, one is known when it is compiled
        if row >= tl.load(count_ptr):
            return
    offsets = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    counted = target >= 0
    num_pieces = tl.cdiv(classes, piece_classes)
    far_row = row.to(tl.int64)
    logsumexp = tl.full([], 0.0, tl.float32)
    if KNOWN:
        logsumexp = tl.load(logsumexp_ptr + row)
    else:
        loss = tl.full([], 0.0, tl.float32)
        if counted:
            highest = tl.full([BLOCK], _LOWEST, tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            plain = tl.zeros([BLOCK], tl.float32)
            for piece in range(num_pieces):
                first = piece * piece_classes
                width = tl.minimum(piece_classes, classes - first)
                begin = _row_begin(
                    logits_ptr, last_ptr, piece, num_pieces, far_row, piece_classes, piece_stride, last_stride
                )
                for start in range(0, width, BLOCK):
                    at = start + offsets
                    inside = at < width
                    x, _ = _logits_of(begin + at, bias_ptr + first + at, inside, softcap, HAS_BIAS, CAPPED)
                    # each lane sums by itself, with one exponential: of the distance to its maximum so far
                    small = tl.exp(-tl.abs(x - highest))
                    total = tl.where(x > highest, total * small + 1.0, total + small)
                    highest = tl.maximum(highest, x)
                    if SMOOTHED:
                        plain += tl.where(inside, x, 0.0)
            top = tl.max(highest, 0)
            logsumexp = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
            piece = (target // piece_classes).to(tl.int32)
            begin = _row_begin(
                logits_ptr, last_ptr, piece, num_pieces, far_row, piece_classes, piece_stride, last_stride
            )
            own, _ = _logits_of(
                begin + (target - piece * piece_classes), bias_ptr + target, counted, softcap, HAS_BIAS, CAPPED
            )
            loss = logsumexp - keep * own
            if SMOOTHED:
                loss -= spread * tl.sum(plain, 0)
        tl.store(loss_ptr + row, loss)
        tl.store(logsumexp_ptr + row, logsumexp)
    if GRADIENTS:
        tl.debug_barrier()  # the target's logit is read before another thread writes its gradient there
        less = tl.load(factor_ptr + row)
        factor = less
        if Z:
            factor += 2.0 * logsumexp * tl.load(z_factor_ptr + row)
        for piece in range(num_pieces):
            first = piece * piece_classes
            width = tl.minimum(piece_classes, classes - first)
            begin = _row_begin(
                logits_ptr, last_ptr, piece, num_pieces, far_row, piece_classes, piece_stride, last_stride
            )
            for start in range(0, width, BLOCK):
                at = start + offsets
                inside = at < width
                x, slope = _logits_of(begin + at, bias_ptr + first + at, inside & counted, softcap, HAS_BIAS, CAPPED)
                gradient = tl.exp(x - logsumexp) * factor
                if SMOOTHED:
                    gradient -= spread * less
                gradient -= tl.where(first + at == target, keep * less, 0.0)
                if CAPPED:
                    gradient *= slope
                gradient = tl.where(counted, gradient, 0.0)
                tl.store(begin + at, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    count_ptr,  # () int64
    m,
    n,
    k,
    a_stride_m,
    a_stride_k,
    b_stride_k,
    b_stride_n,
    c_stride_m,
    INNER_COUNTED: tl.constexpr,  # whether count limits k, not m
    ADD: tl.constexpr,
    WIDE: tl.constexpr,  # for the interpreter, which would multiply bfloat16 as integers
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the product a b, or its sum with c, where only the first `count` of a's rows, or of its columns, count.

    2 count n k flops (2 m n count). Each element is summed by one program, in one fixed order.
    """
    count = tl.load(count_ptr).to(tl.int32)
    if INNER_COUNTED:
        k = tl.minimum(k, count)
    else:
        m = tl.minimum(m, count)
    pid = tl.program_id(0)
    # 8 tiles of rows by all columns at a time, so that their operands stay in L2
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = pid // (8 * tiles_n)
    tiles_m = tl.cdiv(m, BLOCK_M)
    size = tl.minimum(tiles_m - group * 8, 8)
    if size <= 0:
        return
    within = pid % (8 * tiles_n)
    row = group * 8 + within % size
    column = within // size
    if column >= tiles_n:
        return
    offs_m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = offs_m < m
    in_n = offs_n < n
    a_place = a_ptr + offs_m[:, None] * a_stride_m + offs_k[None, :] * a_stride_k
    b_place = b_ptr + offs_k[:, None] * b_stride_k + offs_n[None, :] * b_stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        in_k = offs_k < k - start
        a = tl.load(a_place, mask=in_m[:, None] & in_k[None, :], other=0.0)
        b = tl.load(b_place, mask=in_k[:, None] & in_n[None, :], other=0.0)
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total)
        a_place += BLOCK_K * a_stride_k
        b_place += BLOCK_K * b_stride_k
    place = c_ptr + offs_m[:, None].to(tl.int64) * c_stride_m + offs_n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total.to(c_ptr.dtype.element_ty), mask=inside)


_POINTERS = ("logits_ptr", "last_ptr", "bias_ptr", "target_ptr", "factor_ptr", "z_factor_ptr", "count_ptr")


def _rows_variant(dtype: str, label: str, block: int, num_warps: int, **switches: bool) -> Variant:
    names = ("HAS_BIAS", "SMOOTHED", "CAPPED", "Z", "ORDERED", "KNOWN", "GRADIENTS")
    constants = {name: switches.get(name, name == "GRADIENTS") for name in names} | {"BLOCK": block}
    low = f"*{dtype}"
    signature = dict(zip(_POINTERS, (low, low, low, "*i64", "*fp32", "*fp32", "*i64"), strict=True))
    signature |= {"loss_ptr": "*fp32", "logsumexp_ptr": "*fp32"}
    strides = ("classes", "piece_classes", "piece_stride", "last_stride")
    signature |= dict.fromkeys(strides, "i32") | dict.fromkeys(("keep", "spread", "softcap"), "fp32")
    return Variant(
        f"{__name__}:softmax_rows",
        f"{dtype}, {label}, block {block}",
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        num_warps,
        aligned=(*_POINTERS, "loss_ptr", "logsumexp_ptr", *strides),
    )


def _product_variants(dtype: str, tile: Tile) -> list[Variant]:
    """Return the variants of products for logits, the gradient of hidden, and the gradient of weight.

    The variants differ in which dimension has adjacent elements.
    """
    found, wide = [], tile.columns > FLOAT32.columns
    for label, ones, out, inner, add in (
        ("logits", ("a_stride_k", "b_stride_k"), dtype, False, False),
        ("gradient of hidden", ("a_stride_k", "b_stride_n"), "fp32", False, True),
        ("gradient of weight", ("a_stride_m", "b_stride_n"), "fp32" if dtype == "fp16" else dtype, True, False),
    ):
        if wide and out == "fp32":
            continue
        constants: dict[str, Any] = dict.fromkeys(ones, 1)
        constants |= {"INNER_COUNTED": inner, "ADD": add, "WIDE": False}
        constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
        signature = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "c_ptr": f"*{out}", "count_ptr": "*i64"}
        strides = ("a_stride_m", "a_stride_k", "b_stride_k", "b_stride_n", "c_stride_m")
        signature |= dict.fromkeys(("m", "n", "k", *strides), "i32")
        found.append(
            Variant(
                f"{__name__}:product",
                f"{dtype}, {label}, {tile.rows} x {tile.columns} x {tile.inner}",
                signature | dict.fromkeys(constants, "constexpr"),
                constants,
                tile.num_warps,
                tile.num_stages,
                matrix=True,
                aligned=tuple(name for name in signature if name not in ones),
            )
        )
    return found


# Llama and Qwen (plain), Gemma 2 (softcap), GPT-J and Phi (bias), PaLM's z-loss; the sweep without gradients, and the
# backward of a loss per row. Class weights need no variant: they are a factor of the row.
VARIANTS: tuple[Variant, ...] = (
    *(
        _rows_variant(dtype, "plain", setting.block, setting.num_warps)
        for dtype in ("bf16", "fp16", "fp32")
        for setting in SETTINGS[:2]
    ),
    *(
        _rows_variant("bf16", label, setting.block, setting.num_warps, **switches)
        for setting in SETTINGS[:2]
        for label, switches in (
            ("bias", {"HAS_BIAS": True}),
            ("softcap", {"CAPPED": True}),
            ("smoothed, z-loss", {"SMOOTHED": True, "Z": True}),
            ("ordered", {"ORDERED": True}),
            ("loss alone", {"GRADIENTS": False}),
            ("backward", {"KNOWN": True}),
            ("everything", {"HAS_BIAS": True, "SMOOTHED": True, "CAPPED": True, "Z": True, "ORDERED": True}),
        )
    ),
    _rows_variant("fp32", "everything", 4096, 16, HAS_BIAS=True, SMOOTHED=True, CAPPED=True, Z=True, ORDERED=True),
    *(
        variant
        for dtype in ("bf16", "fp16")
        for tile in dict.fromkeys(setting.tile for setting in SETTINGS if setting.tile is not None)
        for variant in _product_variants(dtype, tile)
    ),
)
