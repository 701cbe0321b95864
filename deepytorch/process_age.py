"""How long this process has run: what a pause costs a user is measured against it."""

from __future__ import annotations

import os
import time


def _process_start() -> float:
    """As `time.time()` counts; where nobody tells, now."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_BEGAN = _process_start()


def seconds_since_start() -> float:
    """Since the process was started."""
    return time.time() - _BEGAN
