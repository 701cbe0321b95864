"""The least time that a training step can take on a GPU: for each kernel, the longer of its arithmetic and its traffic.

The roofline of Williams, Waterman and Patterson (Communications of the ACM 52(4), 2009), for bf16 weights and
activations and AdamW with moments in fp32, on one GPU of a data-parallel group. Kernels are fused as far as is common:
a norm with the sum before it, an activation with its product, attention in one (its backward computes scores again),
the head with its loss. Nothing is measured here; `measured` puts a measured step next to the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepytorch.errors import ConfigError

_ELEMENT = 2  # bytes, of bf16
_ADAMW_BYTES = 22  # per parameter: weight, gradient and two moments read, weight and moments written
_ADAMW_TENSORS = 36  # of a launch, in torch's fused optimizers, with at most this many elements:
_ADAMW_ELEMENTS = 320 * 65536
_BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    tflops: dense, in bf16. bandwidth: of its memory, in TB/s. Both are from its maker's data sheet (SXM).
    """

    name: str
    tflops: float
    bandwidth: float


GPUS = (Gpu("A100", 312, 2.04), Gpu("H100", 989, 3.35), Gpu("H200", 989, 4.8), Gpu("B200", 2250, 8.0))


@dataclass(frozen=True)
class Shape:
    """A transformer.

    causal: a decoder, where positions see earlier ones only; else an encoder with a masked-token head.

    gated: its MLP has a second product, of the gate. tied: head and embedding share a weight.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    classes: int
    causal: bool = True
    gated: bool = True
    tied: bool = False

    def products(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of a layer's linear layers."""
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim
        up = [(self.hidden, self.intermediate)] * (2 if self.gated else 1)
        attention = [(self.hidden, heads), (self.hidden, kv_heads), (self.hidden, kv_heads), (heads, self.hidden)]
        return [*attention, *up, (self.intermediate, self.hidden)]

    @property
    def parameters(self) -> int:
        """Return the number of parameters in matrices; norms, biases and positions are left out."""
        layer = sum(inputs * outputs for inputs, outputs in self.products())
        embeddings = self.classes * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + (0 if self.causal else self.hidden * self.hidden)

    @property
    def tensors(self) -> int:
        """Return the number of these matrices."""
        return self.layers * len(self.products()) + (1 if self.tied else 2) + (not self.causal)


SHAPES = (
    Shape("Llama-3-8B", 4096, 32, 32, 8, 128, 14336, 128256),
    Shape("Qwen2.5-0.5B", 896, 24, 14, 2, 64, 4864, 151936, tied=True),
    Shape("BERT-base", 768, 12, 12, 12, 64, 3072, 30522, causal=False, gated=False, tied=True),
)


@dataclass(frozen=True)
class Work:
    """The work of all kernels of one kind in a step. flops and bytes (read and written): of all of them."""

    kind: str
    flops: float
    bytes: float
    launches: int

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time that the kernels can take."""
        return max(self.flops / (gpu.tflops * 1e12), self.bytes / (gpu.bandwidth * 1e12))


@dataclass(frozen=True)
class Step:
    """The work of a training step, for the positions that are computed."""

    tokens: int
    pairs: int  # of queries and keys, per head
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    optimizer: Work

    @property
    def works(self) -> tuple[Work, ...]:
        """Return all kinds of work."""
        return (*self.forward, *self.backward, self.optimizer)

    @property
    def launches(self) -> int:
        """Return the number of kernels."""
        return sum(work.launches for work in self.works)

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time that the step can take, kernel after kernel."""
        return sum(work.seconds(gpu) for work in self.works)


def row_lengths(rows: int, positions: int, real: float) -> list[int]:
    """Return the tokens of each row, spread from short to `positions`, so that all rows together fill the share `real`.

    Raises `ConfigError` for a share that such rows cannot have.
    """
    if rows < 1 or positions < 1:
        raise ConfigError(f"{rows} rows of {positions} positions; expected at least one of each.")
    if not 1 / rows < real <= 1.0:
        least = f"{1 / rows:.3g} (one full row of {rows})"
        raise ConfigError(f"a share of {real:g} real tokens; expected more than {least}, and 1 at most.")
    low, high = 0.0, 64.0 * rows
    for _ in range(100):  # lengths are positions * ((row + 1) / rows) ** power: the larger the power, the fewer tokens
        power = (low + high) / 2
        share = sum(((row + 1) / rows) ** power for row in range(rows)) / rows
        low, high = (power, high) if share > real else (low, power)
    return [max(1, round(positions * ((row + 1) / rows) ** low)) for row in range(rows)]


def step_of(shape: Shape, lengths: Sequence[int], *, packed: bool) -> Step:
    """Return the work of a step over rows of these lengths: padded to the longest, or packed.

    Padded rows have a mask, for which all scores are computed; packed rows are cut at their lengths, and causal ones at
    the diagonal.
    """
    longest = max(lengths)
    tokens = sum(lengths) if packed else len(lengths) * longest
    if packed:
        pairs = sum(length * (length + 1) // 2 if shape.causal else length * length for length in lengths)
    else:
        pairs = len(lengths) * longest * longest
    forward = [
        _products(shape, tokens, times=1),
        _attention(shape, tokens, pairs, products=2, launches=1, read_and_written=2),
        _elementwise(shape, tokens, norm=4, rope=2, activation=2, launches=4),
        Work("embedding", 0.0, 2.0 * tokens * shape.hidden * _ELEMENT, 1),
        _head(shape, tokens, times=1),
    ]
    backward = [
        _products(shape, tokens, times=2),
        _attention(shape, tokens, pairs, products=5, launches=3, read_and_written=4),
        _elementwise(shape, tokens, norm=4, rope=2, activation=3, launches=4),
        Work("embedding", 0.0, float((2 * tokens + shape.classes) * shape.hidden * _ELEMENT), 2),
        _head(shape, tokens, times=2),
    ]
    launches = max(math.ceil(shape.tensors / _ADAMW_TENSORS), math.ceil(shape.parameters / _ADAMW_ELEMENTS))
    optimizer = Work("optimizer", 0.0, float(_ADAMW_BYTES * shape.parameters), launches)
    return Step(tokens, pairs, tuple(forward), tuple(backward), optimizer)


def collectives(shape: Shape) -> int:
    """Return the number of all-reduces of a step.

    Buckets have `DistributedDataParallel`'s default size, and gradients are in bf16.
    """
    return math.ceil(shape.parameters * _ELEMENT / _BUCKET_BYTES)


def _linear(tokens: int, inputs: int, outputs: int, times: int) -> tuple[float, float]:
    """Return flops and bytes of `times` products of the same three matrices."""
    traffic = tokens * inputs + inputs * outputs + tokens * outputs
    return 2.0 * times * tokens * inputs * outputs, float(times * traffic * _ELEMENT)


def _products(shape: Shape, tokens: int, times: int) -> Work:
    found = [_linear(tokens, inputs, outputs, times) for inputs, outputs in shape.products()]
    flops, traffic = (shape.layers * sum(each) for each in zip(*found, strict=True))
    return Work("linear layers", flops, traffic, shape.layers * len(found) * times)


def _attention(shape: Shape, tokens: int, pairs: int, *, products: int, launches: int, read_and_written: int) -> Work:
    """Return the work of attention.

    products: of (pairs, head_dim). read_and_written: how often queries and outputs, and keys and values, are moved.
    """
    flops = 2.0 * products * pairs * shape.heads * shape.head_dim
    width = (shape.heads + shape.kv_heads) * shape.head_dim
    return Work(
        "attention",
        shape.layers * flops,
        float(shape.layers * read_and_written * tokens * width * _ELEMENT),
        shape.layers * launches,
    )


def _elementwise(shape: Shape, tokens: int, *, norm: int, rope: int, activation: int, launches: int) -> Work:
    """Return the work of elementwise kernels, by how often values are moved.

    The kernels are two norms with their sums, rotary positions (of decoders), and the activation, which reads or writes
    one value more if it is gated.
    """
    heads = (shape.heads + shape.kv_heads) * shape.head_dim if shape.causal else 0
    gated = shape.intermediate * (activation + (activation - 1 if shape.gated else 0))
    width = 2 * norm * shape.hidden + rope * heads + gated
    return Work("norms and activations", 0.0, float(shape.layers * tokens * width * _ELEMENT), shape.layers * launches)


def _head(shape: Shape, tokens: int, times: int) -> Work:
    """Return the work of the head with its loss; encoders have one more linear layer before it.

    Logits are moved three times in all.
    """
    flops, traffic = _linear(tokens, shape.hidden, shape.classes, times)
    if not shape.causal:
        more_flops, more_traffic = _linear(tokens, shape.hidden, shape.hidden, times)
        flops, traffic = flops + more_flops, traffic + more_traffic
    logits = tokens * shape.classes * _ELEMENT
    return Work(
        "head and loss", flops, traffic + (2 * logits if times == 1 else logits), times * (1 if shape.causal else 2) + 1
    )


@dataclass(frozen=True)
class RooflineRow:
    """One model on one GPU: padded and packed. measured: milliseconds of a step that was run there, if one was."""

    model: str
    gpu: str
    padded_tflop: float
    packed_tflop: float
    padded_gb: float
    packed_gb: float
    launches: int
    collectives: int
    padded_ms: float
    packed_ms: float
    measured_padded_ms: float | None = None
    measured_packed_ms: float | None = None

    @property
    def gain(self) -> float:
        """Return how many times faster packed is, by the roofline."""
        return self.padded_ms / self.packed_ms


def roofline(lengths: Sequence[int], measured: Mapping[str, Mapping[str, Any]] | None = None) -> list[RooflineRow]:
    """Return a row for each of `SHAPES` on each of `GPUS`.

    measured: "MODEL on GPU" -> {"padded_ms": ..., "packed_ms": ...}. Raises `ConfigError` for a measured step of a
    model or GPU that is not among them.
    """
    measured = dict(measured or {})
    rows = []
    for shape in SHAPES:
        padded, packed = (step_of(shape, lengths, packed=each) for each in (False, True))
        for gpu in GPUS:
            found = measured.pop(f"{shape.name} on {gpu.name}", {})
            rows.append(
                RooflineRow(
                    model=shape.name,
                    gpu=gpu.name,
                    padded_tflop=sum(work.flops for work in padded.works) / 1e12,
                    packed_tflop=sum(work.flops for work in packed.works) / 1e12,
                    padded_gb=sum(work.bytes for work in padded.works) / 1e9,
                    packed_gb=sum(work.bytes for work in packed.works) / 1e9,
                    launches=packed.launches,
                    collectives=collectives(shape),
                    padded_ms=1e3 * padded.seconds(gpu),
                    packed_ms=1e3 * packed.seconds(gpu),
                    measured_padded_ms=found.get("padded_ms"),
                    measured_packed_ms=found.get("packed_ms"),
                )
            )
    if measured:
        known = ", ".join(f"{row.model} on {row.gpu}" for row in rows)
        raise ConfigError(f"measured steps of {', '.join(map(repr, measured))}; expected some of: {known}.")
    return rows


def to_json(rows: Sequence[RooflineRow], lengths: Sequence[int]) -> dict[str, Any]:
    """Return all computed values, and the lengths and shapes they are computed from."""
    return {
        "lengths": list(lengths),
        "gpus": [asdict(gpu) for gpu in GPUS],
        "models": [asdict(shape) | {"parameters": shape.parameters} for shape in SHAPES],
        "rows": [asdict(row) | {"gain": row.gain} for row in rows],
    }


def markdown(rows: Sequence[RooflineRow], lengths: Sequence[int], command: str) -> str:
    """Return a page of the documentation."""
    share = sum(lengths) / (len(lengths) * max(lengths))
    gpus = "; ".join(f"{gpu.name} {gpu.tflops:g} TFLOP/s, {gpu.bandwidth:g} TB/s" for gpu in GPUS)
    lines = [
        "# Rooflines",
        "",
        f"Made by `{command}`.",
        "**Computed, not measured**: the least time that a training step can take, in which each kernel is held up by",
        "its arithmetic or by its traffic alone, whichever takes longer. Real steps take longer.",
        "",
        f"- **batch**: {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {share:.0%} of the positions;",
        "  every token has a label.",
        "- **padded**: rows as long as the longest, with a mask.",
        "- **packed**: tokens alone, attention cut at each row's length.",
        "- **weights and activations** in bf16, AdamW with moments in fp32, no recomputation, kernels fused as",
        "  `deepytorch/bench/roofline.py` says. Whether all that fits into a GPU's memory is not asked.",
        f"- **GPUs**, dense bf16 and memory, by their data sheets: {gpus}.",
        "- **launches** of a packed step; **collectives**: all-reduces of 25 MiB of gradients between ranks.",
        "- **measured**: a step that was run, where there is one.",
        "",
        "| model | GPU | TFLOP padded / packed | GB padded / packed | launches | collectives | ms padded / packed "
        "| gain | measured, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.gpu} | {row.padded_tflop:.3g} / {row.packed_tflop:.3g} "
            f"| {row.padded_gb:.3g} / {row.packed_gb:.3g} | {row.launches} | {row.collectives} "
            f"| {row.padded_ms:.4g} / {row.packed_ms:.4g} | {row.gain:.2f}x | {measured_text(row)} |"
        )
    return "\n".join(lines) + "\n"


def measured_text(row: RooflineRow) -> str:
    """Return the measured times of a row, for people to read."""
    if row.measured_padded_ms is None and row.measured_packed_ms is None:
        return "none yet"
    found = ("-" if each is None else f"{each:.3g}" for each in (row.measured_padded_ms, row.measured_packed_ms))
    return " / ".join(found)
