"""What ranks of the kind `training` return, with invented numbers, and results of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepytorch.bench.results import Results, Row


def rank(seconds: list[float], **changes: Any) -> dict[str, Any]:
    """Return what one rank has found."""
    return {
        "seconds": seconds,
        "cpu_seconds": seconds,
        "warm_up": [3.0, *[seconds[0]] * 5],
        "first_s": 4.0,
        "losses": [2.0, 1.0],
        "rows": 8.0,
        "tokens": 800.0,
        "positions": 1600.0,
        "batches": 1,
        "process_mb": 500.0,
        "peak_mb": 200.0,
        "plan": "",
        "fallbacks": [],
        "hardware": {},
        "ready": {},
    } | changes


def results(benchmark: str, rows: Sequence[Row], **options: Any) -> Results:
    """Return the results of a benchmark on a machine that is not told."""
    return Results(
        benchmark=benchmark, command="", options=options, machine="", versions={}, date="2026-11-29", rows=[*rows]
    )
