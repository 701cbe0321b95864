"""The interface of algorithms: a collective operation, the choice of how to run it, and an algorithm's description."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from deepytorch.comm.topology.cost import Links, cast_us_per_byte
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import ConfigError

OperationKind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
KINDS: tuple[OperationKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
DeviceKind = Literal["cpu", "cuda"]
Compression = Literal["bf16", "fp16", "fp8"]

DTYPE_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
COMPRESSED_BYTES: dict[Compression, int] = {"bf16": 2, "fp16": 2, "fp8": 1}
FLOATS = frozenset({"fp64", "fp32", "bf16", "fp16"})
_SPELLED_BY_TORCH = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# Chunk sizes are powers of two, so that one choice holds for a range of sizes.
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, MOST_CHUNKS = 1 << 16, 1 << 24, 64
MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective. `num_bytes` is counted as in nccl-tests: the bytes of the larger of input and output.

    `dtype` is a short name (see `dtype_name`). `reduce_op` is "sum", "avg", "min", "max" or any other that c10d knows,
    and has no meaning for all_gather and broadcast.
    """

    kind: OperationKind
    num_bytes: int
    dtype: str = "fp32"
    reduce_op: str = "sum"
    device: DeviceKind = "cpu"

    @property
    def reduces(self) -> bool:
        """Return whether values are combined, and not only moved."""
        return self.kind in ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm and its settings, as the native code receives them.

    chunk_bytes: the most payload bytes in one chunk; the payload is cut into `num_chunks` equal chunks. 0: one chunk.
    num_streams: connections of one rank to each neighbour on another host, used by the chunks in turn. compress: the
    type that values are cast to between hosts (None: exact).
    """

    algorithm: str
    chunk_bytes: int = 0
    num_streams: int = 1
    compress: Compression | None = None

    def num_chunks(self, num_bytes: int) -> int:
        """Return the number of equal chunks that a payload of `num_bytes` is cut into."""
        return max(1, math.ceil(num_bytes / self.chunk_bytes)) if self.chunk_bytes else 1


class Collective(ABC):
    """One algorithm: its abilities and their cost. The native code that runs it takes the `Choice`.

    The attributes say what it needs; a subclass adds to `unavailable` and `refused` what they cannot say.
    """

    name: ClassVar[str]
    compresses: ClassVar[bool] = False  # whether its choices may be given `compress`
    in_memory: ClassVar[bool] = False  # whether the ranks of a host have to share memory
    kinds: ClassVar[tuple[OperationKind, ...]] = KINDS
    device: ClassVar[DeviceKind | None] = None  # None: any
    several_hosts: ClassVar[bool | None] = None  # False: one host only; None: any number
    equal_hosts: ClassVar[bool] = False  # whether every host has to have as many ranks
    ranks_of_a_host: ClassVar[tuple[float, float]] = (1, math.inf)  # the fewest and the most
    from_bytes: ClassVar[int] = 0
    below_bytes: ClassVar[float] = math.inf

    def unsupported(self, operation: Operation, topology: Topology) -> str | None:
        """Return why this algorithm cannot do the operation on this topology, in a user's words, or None if it can."""
        return self.unavailable(operation.kind, operation.device, topology) or self.refused(operation)

    def unavailable(self, kind: OperationKind, device: DeviceKind, topology: Topology) -> str | None:
        """Return why the ranks of this topology cannot run this algorithm for any payload, or None if they can."""
        if self.device is not None and self.device != device:
            return f"works on {self.device.upper()} tensors, found {device}"
        if self.several_hosts is False and topology.num_hosts > 1:
            return f"works on one host, found {topology.num_hosts}"
        if self.several_hosts and topology.num_hosts == 1:
            return "needs several hosts, found 1"
        if self.equal_hosts and not topology.is_regular:
            return "needs as many ranks on every host, found different numbers"
        if kind not in self.kinds:
            return f"does {' and '.join(self.kinds)} only, found {kind}"
        least, most = self.ranks_of_a_host
        if not least <= topology.ranks_per_host <= most:
            return f"works among {least:.0f} to {most:.0f} ranks of a host, found {topology.ranks_per_host}"
        return None

    def refused(self, operation: Operation) -> str | None:
        """Return why this algorithm does not take this payload (type, reduction, size), or None if it does."""
        if operation.num_bytes < self.from_bytes:
            return f"starts at {self.from_bytes} bytes, found {operation.num_bytes}"
        if operation.num_bytes >= self.below_bytes:
            return f"works below {self.below_bytes} bytes, found {operation.num_bytes}"
        return None

    @abstractmethod
    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time. `links` must be complete: see `nominal.complete`."""

    def choices(self, operation: Operation, topology: Topology, links: Links) -> Sequence[Choice]:
        """Return the settings worth considering, the plainest first; here one choice, as there is nothing to set."""
        return (Choice(self.name),)


def dtype_name(dtype: object) -> str:
    """Return the short name of a `torch.dtype`: fp32 for torch.float32, int32 for torch.int32."""
    name = str(dtype).removeprefix("torch.")
    return _SPELLED_BY_TORCH.get(name, name)


def share_of_all_reduce(kind: OperationKind, num_ranks: int) -> tuple[float, float]:
    """Return latency and bytes of `kind`, as parts of those of an all-reduce of as many bytes.

    reduce_scatter and all_gather are the two halves of an all-reduce. broadcast sends the payload once, whereas an
    all-reduce sends `2 (n - 1) / n` of it.
    """
    if kind == "all_reduce" or num_ranks == 1:
        return 1.0, 1.0
    return 0.5, num_ranks / (2 * (num_ranks - 1)) if kind == "broadcast" else 0.5


def compressed_ratio(dtype: str, compress: Compression | None) -> float:
    """Return the bytes between hosts for each payload byte: 1 without compression.

    Raises:
        ConfigError: compression gains nothing.
    """
    if compress is None:
        return 1.0
    if compress not in COMPRESSED_BYTES:
        raise ConfigError(f"compression {compress!r}; expected one of {', '.join(COMPRESSED_BYTES)}, or None")
    if not _is_wider(dtype, compress):
        raise ConfigError(f"{dtype} cannot be compressed to {compress}; expected a floating-point type that is wider")
    return COMPRESSED_BYTES[compress] / DTYPE_BYTES[dtype]


def compressed_cost(operation: Operation, links: Links, choice: Choice) -> tuple[float, float]:
    """Return the bytes between hosts for each payload byte, and the us that the casts of a payload byte take."""
    ratio = compressed_ratio(operation.dtype, choice.compress)
    return ratio, 0.0 if choice.compress is None else cast_us_per_byte(links.copy_us_per_byte(), ratio)


def can_compress(operation: Operation, compress: Compression) -> bool:
    """Return whether a cast between hosts is possible: for a sum or average of a wider floating-point type."""
    sums = operation.kind == "all_reduce" and operation.reduce_op in ("sum", "avg")
    return sums and _is_wider(operation.dtype, compress)


def _is_wider(dtype: str, compress: Compression) -> bool:
    return dtype in FLOATS and COMPRESSED_BYTES[compress] < DTYPE_BYTES[dtype]


def stream_counts(links: Links, num_rings: int) -> list[int]:
    """Return the numbers of streams worth considering for each of the rings that leave a host; 1 first.

    The numbers are those that were measured and that the rings can share.
    """
    shared = {streams // num_rings for streams in links.network if streams % num_rings == 0}
    return sorted({1} | {count for count in shared if count <= MOST_STREAMS})


def chunk_sizes(num_bytes: int, at_least: int = 1) -> list[int]:
    """Return chunk sizes worth considering for a payload, the largest first.

    The sizes are powers of two that give `at_least` to `MOST_CHUNKS` chunks.
    """
    sizes = []
    chunk = MOST_CHUNK_BYTES
    while chunk >= LEAST_CHUNK_BYTES:
        if chunk * max(2, at_least) <= num_bytes <= chunk * MOST_CHUNKS:
            sizes.append(chunk)
        chunk //= 2
    return sizes
