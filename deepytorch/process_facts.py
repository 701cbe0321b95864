"""The age of this process, against which the cost of a pause is measured, the memory that it has taken, and its CPU."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from pathlib import Path


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


def peak_memory() -> int:
    """Return the most memory that this process has taken so far, in bytes.

    By `getrusage` it would be the parent's, if that is more: Linux hands the peak on through `fork` and `exec`.
    """
    found = _memory("VmHWM")
    if found is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def memory() -> int:
    """Return the memory that this process takes now, in bytes; 0 if the system does not tell."""
    return _memory("VmRSS") or 0


def _memory(name: str) -> int | None:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


def cpu_model() -> str:
    """Return the name of the CPU's model, or of its architecture if the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
