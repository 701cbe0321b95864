"""The options of `deepytorch bench comm`, which every rank receives, and the arms that follow from them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import product

import torch

from deepytorch.bench.comm_schema import DTYPES, OPS, REDOPS
from deepytorch.bench.options import check_at_least, check_choice, check_rates
from deepytorch.comm.algorithms.base import Compression
from deepytorch.comm.algorithms.select import COLLECTIVES
from deepytorch.errors import ConfigError

AUTO = "auto"
BACKENDS = ("deepytorch", "gloo")
COMPRESS: dict[str, Compression | None] = {"none": None, "bf16": "bf16", "fp16": "fp16"}
MAX_SIZE_BYTES = 4 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommArm:
    """One way to run the collectives, with its own process group."""

    name: str
    backend: str
    algorithm: str = AUTO
    compress: Compression | None = None
    allocated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """The options of the measurement, equal on all ranks: operations, sizes and ranks.

    Rates are as in `deepytorch lab`, for `hosts` above 1.
    """

    ranks: int = 2  # of each host
    hosts: int = 1
    rate: str | None = None
    flow_rate: str | None = None
    backends: tuple[str, ...] = BACKENDS
    sizes_bytes: tuple[int, ...] = (1 << 10, 1 << 20)
    dtype: str = "float32"
    ops: tuple[str, ...] = ("all_reduce",)
    redop: str = "sum"
    algorithms: tuple[str, ...] = (AUTO,)  # of the deepytorch backend, one arm each
    compress: tuple[str, ...] = ("none",)  # likewise
    allocated: bool = False  # one more arm for each arm of the deepytorch backend, with buffers from `comm.allocate`
    rounds: int = 5
    min_time_ms: float = 100.0  # of a cell, over all its rounds
    timeout_s: float = 300.0  # of one collective
    explain: bool = False  # measure nothing; only report the basis of the deepytorch backend's choices

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run."""
        check_at_least(self, 1, "ranks", "hosts", "rounds")
        for name in ("min_time_ms", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number above 0.")
        if self.ranks * self.hosts < 2:
            raise ConfigError("There is one rank in all, expected at least 2: give --ranks 2.")
        check_rates(self)
        check_choice(self, "ops", OPS)
        check_choice(self, "backends", BACKENDS)
        check_choice(self, "algorithms", (AUTO, *(collective.name for collective in COLLECTIVES)))
        check_choice(self, "compress", COMPRESS)
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "redop", REDOPS)
        if not self.sizes_bytes:
            raise ConfigError("sizes_bytes is empty, expected at least one.")
        if self.redop == "avg" and not getattr(torch, self.dtype).is_floating_point:
            raise ConfigError(f"The average of {self.dtype} has no exact result: take --redop sum or a float dtype.")
        of_ours = self.allocated or self.algorithms != (AUTO,) or self.compress != ("none",)
        if of_ours and "deepytorch" not in self.backends:
            raise ConfigError(
                f"backends has {', '.join(self.backends)} only, and algorithms, compress and allocated are of "
                "deepytorch: add it, or leave them out."
            )
        if self.backends.count("deepytorch") > 1:
            raise ConfigError("backends has deepytorch more than once: its arms are named by algorithms and compress.")

    def arms(self) -> tuple[CommArm, ...]:
        """Return the arms in the order of the backends, each with its own name."""
        arms: list[CommArm] = []
        for backend in self.backends:
            if backend == "deepytorch":
                settings = product(self.algorithms, self.compress, (False, True) if self.allocated else (False,))
                arms += [_arm_of_ours(*each) for each in settings]
            else:
                before = sum(arm.backend == backend for arm in arms)
                arms.append(CommArm(name=f"{backend}#{before + 1}" if before else backend, backend=backend))
        return tuple(arms)


def _arm_of_ours(algorithm: str, compress: str, allocated: bool) -> CommArm:
    parts = ["deepytorch" if algorithm == AUTO else f"deepytorch:{algorithm}"]
    parts += [compress] if compress != "none" else []
    parts += ["allocated"] if allocated else []
    return CommArm(
        name="+".join(parts),
        backend="deepytorch",
        algorithm=algorithm,
        compress=COMPRESS[compress],
        allocated=allocated,
    )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that `text` names: `1K:256M` (powers of two), `1K:256M:4` (a factor), `1K,3M`.

    K, M and G are 2**10, 2**20 and 2**30. Raises `ConfigError`.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ConfigError(
                f'The sizes "{part}" have {len(rest) + 1} parts, expected FIRST:LAST or FIRST:LAST:FACTOR.'
            )
        size = _parse_size(first)
        last = _parse_size(rest[0]) if rest else size
        factor = _parse_factor(rest[1]) if len(rest) == 2 else 2
        if last < size:
            raise ConfigError(f'The sizes "{part}" end below their beginning.')
        while size <= last:
            sizes.append(size)
            size *= factor
    return tuple(dict.fromkeys(sizes))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= MAX_SIZE_BYTES:
        raise ConfigError(f'The size is "{text}", expected bytes such as 512, 64K, 16M or 1G, at most 4G.')
    return size


def _parse_factor(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 2:
        raise ConfigError(f'The factor between sizes is "{text}", expected a whole number, 2 or more.')
    return int(text)
