"""The simulator's input for a model: the times of compute in one training step, and when gradients become ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deepytorch.bench.results import Record, decoded
from deepytorch.comm.algorithms.base import DTYPE_BYTES
from deepytorch.comm.topology.checked_json import read_file
from deepytorch.errors import DataError


@dataclass(frozen=True, slots=True)
class BackwardPiece(Record):
    """A part of the backward pass, and the bytes of the gradients that are ready when it ends."""

    what = "piece of the backward pass"

    name: str
    compute_us: float
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class ModelProfile(Record):
    """The step of one rank. `backward` is in the order in which it runs: the last layer first.

    `pieces_are_buckets`: each piece's gradients are reduced together and with no others, whatever the cap.
    """

    what = "model profile"

    name: str
    forward_us: float
    backward: tuple[BackwardPiece, ...]
    bucket_cap_bytes: int
    optimizer_us: float = 0.0
    dtype: str = "fp32"  # of the gradients
    device: str = "cuda"
    note: str = ""
    pieces_are_buckets: bool = False

    def __post_init__(self) -> None:
        """Check every value. Raises `DataError`."""
        Record.__post_init__(self)
        self.require(self.forward_us > 0, "forward_us", "a number above 0")
        self.require(len(self.backward) > 0, "backward", "one piece or more")
        self.require(self.bucket_cap_bytes > 0, "bucket_cap_bytes", "1 or more")
        self.require(self.dtype in DTYPE_BYTES, "dtype", f"one of {', '.join(DTYPE_BYTES)}")
        self.require(self.device in ("cpu", "cuda"), "device", "one of cpu, cuda")

    @property
    def compute_us(self) -> float:
        """Return the time of the step on one rank alone."""
        return self.forward_us + sum(piece.compute_us for piece in self.backward) + self.optimizer_us

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(piece.gradient_bytes for piece in self.backward)

    def slowed(self, factor: float) -> ModelProfile:
        """Return the profile of ranks that compute `factor` times as long."""
        backward = tuple(replace(piece, compute_us=factor * piece.compute_us) for piece in self.backward)
        forward_us, optimizer_us = factor * self.forward_us, factor * self.optimizer_us
        return replace(self, forward_us=forward_us, backward=backward, optimizer_us=optimizer_us)


def read_profile(path: Path) -> ModelProfile:
    """Read a profile file. Raises `DataError` when it cannot be read or has another layout."""
    content = read_file(path, "model profile")
    try:
        return decoded(ModelProfile, content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
