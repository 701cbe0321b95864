"""The options of a process group."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch.comm.algorithms.base import Compression
from deepytorch.comm.algorithms.select import COLLECTIVES
from deepytorch.comm.topology.cost import Links
from deepytorch.errors import ConfigError

_NATIVE = tuple(found.name for found in COLLECTIVES)


@dataclass(frozen=True)
class Options:
    """The options of a group, for `init_process_group("deepytorch", pg_options=Options(...))` or `new_group`.

    Attributes:
        algorithm: one algorithm for every size, in place of the choice by measurement ("engine": gloo and nccl alone).
        compress: "bf16" or "fp16": sums and averages of float32 may be cast to this type between hosts, if faster.
        quantize: "int8" or "fp8": reduce_scatter_tensor and all_gather_into_tensor of floats on the CPU, of 16,384
            values or more, send one byte per value between hosts, with error feedback from step to step (a step ends
            with `optimizer.step()`); for ZeRO. For FSDP2 see `deepytorch.comm.quantize`.
        links: measured costs to choose by; None measures the links, or takes the remembered ones of this topology.
        chunk_bytes, num_streams: settings of a forced `algorithm`; 0 leaves the choice to the algorithm.
        area_bytes: shared memory of each rank for one chunk; 0 fits the size to the caches, or for CPU-Reduce to PCIe.
        one_shot_bytes: every rank reads payloads of up to this size as a whole.
    """

    algorithm: str | None = None
    compress: Compression | None = None
    quantize: str | None = None
    links: Links | None = None
    chunk_bytes: int = 0
    num_streams: int = 0
    area_bytes: int = 0
    one_shot_bytes: int = 1 << 15

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid value."""
        if self.algorithm is not None and self.algorithm not in _NATIVE:
            raise ConfigError(f"algorithm={self.algorithm!r}; expected None or one of {', '.join(_NATIVE)}")
        # Here, since it loads torch: `deepytorch config`, which shows the defaults, does without.
        from deepytorch.comm.group.wire import COMPRESS_IF_FASTER, QUANTIZE_GROUP

        COMPRESS_IF_FASTER.check_type(self.compress)
        QUANTIZE_GROUP.check_type(self.quantize)
        for name in ("num_streams", "one_shot_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; expected 0 or more")
        if 0 < self.chunk_bytes < 64 or self.chunk_bytes < 0:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}; expected 0, or 64 or more")
        if self.area_bytes < 0 or self.area_bytes % 4096:
            raise ConfigError(f"area_bytes={self.area_bytes}; expected 0 or a multiple of 4096")
