"""The simulator's input for a model: the times of compute in one training step, and when gradients become ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepytorch.comm.algorithms.base import DTYPE_BYTES, DeviceKind
from deepytorch.comm.topology.checked_json import as_count, as_list, as_number, as_object, as_text, read_file
from deepytorch.errors import DataError


@dataclass(frozen=True, slots=True)
class BackwardPiece:
    """A part of the backward pass, and the bytes of the gradients that are ready when it ends."""

    name: str
    compute_us: float
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The step of one rank. `backward` is in the order in which it runs: the last layer first.

    `pieces_are_buckets`: each piece's gradients are reduced together and with no others, whatever the cap.
    """

    name: str
    forward_us: float
    backward: tuple[BackwardPiece, ...]
    bucket_cap_bytes: int
    optimizer_us: float = 0.0
    dtype: str = "fp32"  # of the gradients
    device: DeviceKind = "cuda"
    note: str = ""
    pieces_are_buckets: bool = False

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

    @staticmethod
    def from_json(content: Any) -> ModelProfile:
        """Return the profile that a JSON value holds, as `asdict` gives it. Raises `DataError` for another layout."""
        required = ("name", "forward_us", "backward", "bucket_cap_bytes")
        optional = ("optimizer_us", "dtype", "device", "note", "pieces_are_buckets")
        values = as_object(content, "the profile", required, optional)
        backward = tuple(_piece(value, f"backward[{at}]") for at, value in enumerate(_pieces(values["backward"])))
        return ModelProfile(
            name=as_text(values["name"], "name"),
            forward_us=as_number(values["forward_us"], "forward_us", above_zero=True),
            backward=backward,
            bucket_cap_bytes=as_count(values["bucket_cap_bytes"], "bucket_cap_bytes", 1),
            optimizer_us=as_number(values.get("optimizer_us", 0.0), "optimizer_us"),
            dtype=as_text(values.get("dtype", "fp32"), "dtype", DTYPE_BYTES),
            device="cpu" if as_text(values.get("device", "cuda"), "device", ("cpu", "cuda")) == "cpu" else "cuda",
            note=as_text(values.get("note", ""), "note"),
            pieces_are_buckets=_flag(values.get("pieces_are_buckets", False), "pieces_are_buckets"),
        )


def read_profile(path: Path) -> ModelProfile:
    """Read a profile file. Raises `DataError` when it cannot be read or has another layout."""
    try:
        return ModelProfile.from_json(read_file(path, "model profile"))
    except DataError as error:
        if str(path) in str(error):
            raise
        raise DataError(f"{path}: {error}") from error


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise DataError(f"{where} is {value!r:.60}, expected true or false.")
    return value


def _pieces(value: Any) -> list[Any]:
    pieces = as_list(value, "backward")
    if not pieces:
        raise DataError("backward is empty, expected one piece or more.")
    return pieces


def _piece(content: Any, where: str) -> BackwardPiece:
    values = as_object(content, where, ("name", "compute_us", "gradient_bytes"))
    return BackwardPiece(
        as_text(values["name"], f"{where}, name"),
        as_number(values["compute_us"], f"{where}, compute_us"),
        as_count(values["gradient_bytes"], f"{where}, gradient_bytes"),
    )
