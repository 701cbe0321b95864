"""Freed memory that a training process keeps on a CPU, as torch's allocator keeps it on a GPU.

[Note: Kept memory]
A step frees its activations, and the next step needs as many. glibc's `malloc` gives large free blocks back to the
system, which clears every page and maps it anew when it is touched next. A step of VGG-16 (a quarter of the width,
batch 4) has 25,000 such page faults, an eighth of its time; none when memory is kept. The values that a step computes
are the same to the last bit.

A process keeps no more than it has had in use at one time, and some holes. If the machine, or the process's control
group, runs short of memory, all of it is given back, for good.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch.config import Environment, process_environment
from deepytorch.log import logger, once
from deepytorch.patches import listen

# Parameters of `mallopt`, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST_BLOCK = 1 << 30  # larger ones are given back as soon as they are freed, as before
# The values that glibc itself arrives at in a process with large blocks (`mallopt`'s manual, the dynamic threshold).
_USUAL = ((_MMAP_THRESHOLD, 32 << 20), (_MMAP_MAX, 65_536), (_TRIM_THRESHOLD, 64 << 20))
_OTHERS_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_LEAST_TO_BEGIN, _LEAST = 0.25, 0.10  # shares of the memory that have to be available
_STEPS_BETWEEN_LOOKS = 16
_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class KeptMemory:
    """Memory that is kept, or given back. is_kept: whether freed memory stays with the process now."""

    def __init__(self) -> None:
        self.is_kept, self._has_ended, self._steps = False, False, 0

    def keep(self) -> bool:
        """Keep memory that is freed from now on; return whether it is kept. May be called any number of times.

        It is not kept if the process has another allocator than glibc's, if somebody has set that one up, if memory
        is short, or if `DEEPYTORCH_MEMORY=release` is set.
        """
        if self.is_kept or self._has_ended:
            return self.is_kept
        reason = _reason_against(process_environment())
        libc = None if reason else _glibc()
        if libc is None:
            logger.debug("freed memory is given back to the system: %s", reason or "the C library is not glibc")
            self._has_ended = True
            return False
        # Before glibc 2.35 the threshold has a limit of 32 MB; then no block is mapped on its own.
        if not libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK):
            libc.mallopt(_MMAP_MAX, 0)
        self.is_kept = bool(libc.mallopt(_TRIM_THRESHOLD, -1))
        listen(register_optimizer_step_post_hook, self.look, "see if memory is short", self.give_back)
        return self.is_kept

    def give_back(self) -> None:
        """Give kept memory back to the system, and keep none until `keep` is called."""
        libc = _glibc() if self.is_kept else None
        self.is_kept = False
        if libc is not None:
            for parameter, value in _USUAL:
                libc.mallopt(parameter, value)
            libc.malloc_trim(0)

    def look(self, *_: object) -> None:
        """Give memory back for good if it is short; torch calls this after each step of an optimizer."""
        self._steps += 1
        if not self.is_kept or self._steps % _STEPS_BETWEEN_LOOKS:
            return
        share = available_share()
        if share is not None and share < _LEAST:
            once(logging.INFO, "memory is short: freed memory is given back to the system from now on")
            self.give_back()
            self._has_ended = True


def _reason_against(variables: Mapping[str, str]) -> str | None:
    if not Environment.read(variables).keep_memory:
        return "DEEPYTORCH_MEMORY=release is set"
    mine = [name for name in _OTHERS_SETTINGS if name in variables]
    if "glibc.malloc" in variables.get("GLIBC_TUNABLES", ""):
        mine.append("GLIBC_TUNABLES")
    if "malloc" in variables.get("LD_PRELOAD", ""):
        mine.append("LD_PRELOAD")
    if mine:
        return f"{mine[0]} is set"
    share = available_share()
    if share is not None and share < _LEAST_TO_BEGIN:
        return f"only {share:.0%} of the memory is available"
    return None


def _glibc() -> Any:
    """Return the C library of this process, or None if it is not glibc."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018, raises where there is no such function
        libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except (AttributeError, OSError, TypeError):
        return None
    return libc


def available_share() -> float | None:
    """Return the share of memory, 0 to 1, that this process may still take; None if the system does not say."""
    found = available_memory()
    return None if found is None else found[0]


def available_memory() -> tuple[float, int] | None:
    """Return the share of memory, 0 to 1, and the bytes, that this process may still take; None if unknown."""
    try:
        lines = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        total, available = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None
    share = available / total
    limit = _of_group("memory.max")
    if limit is not None and limit < total:
        try:
            used = dict(line.split() for line in (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
            share = min(share, 1.0 - int(used["anon"]) / limit)
            available = min(available, limit - int(used["anon"]))
        except (OSError, ValueError, KeyError):
            pass
    return max(0.0, share), max(0, available)


def _of_group(name: str) -> int | None:
    """Return a number of the control group of this process; None if there is none, as without a limit."""
    try:
        return int((_GROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


MEMORY = KeptMemory()
