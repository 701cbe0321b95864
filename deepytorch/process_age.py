"""The age of this process, against which the cost of a pause is measured."""

from __future__ import annotations

import os
import time


def _process_start() -> float:
    """Return the start of this process, as `time.time()` counts; now if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_BEGAN = _process_start()


def seconds_since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - _BEGAN
