"""What ranks of the kind `training` return, with invented numbers."""

from __future__ import annotations

from typing import Any


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
