"""The jobs that benchmarks give to ranks, as plain values; what does them loads torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What one rank trains, and how.

    Attributes:
        model, size: Of the zoo.
        rows: Examples of a batch of this rank; 0: those that the model is known with.
        precision: fp32; amp, autocast to bf16; bf16, weights too.
        steps: How many are timed.
        warm_up: Steps before them.
        compiles: Whether deepytorch compiles, where it is imported.
        compress: The type that deepytorch's process group casts sums to between hosts.
        hardware: Whether the use of the host's hardware is sampled while steps are timed.
        timeout_s: Of a collective.
    """

    model: str
    size: str = "cpu"
    rows: int = 0
    precision: str = "fp32"
    device: str = "cpu"
    steps: int = 10
    warm_up: int = 3
    compiles: bool = True
    compress: str | None = None
    hardware: bool = False
    timeout_s: float = 600.0
