"""The C++ extension of `csrc`: attention over packed rows on a CPU, used as soon as it is compiled."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

from deepytorch import background
from deepytorch.config import Environment
from deepytorch.extension import Extension

native = Extension(
    "deepytorch_ops",
    Path(__file__).parent,
    what="attention on a CPU",
    without="attention on a CPU stays on torch's own kernel",
    # Loops become vector instructions if comparisons may be speculated and `errno` is not set. Results stay the same,
    # also for NaN and infinities. Only the header of `at::parallel_for` needs OpenMP: torch has the library.
    flags=("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-mprefer-vector-width=512"),
    alone=("bindings",),
)

_PATIENCE_SECONDS = 60.0  # compiling takes 15 s of a core, which a shorter run would not win back
_LOOK_SECONDS = 1.0


def can_build() -> bool:
    """Return whether the C++ supports machines of this kind."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def can_run() -> bool:
    """Return whether this CPU has the instructions that the kernels and the oneDNN products below them need."""
    return can_build() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class Kernels:
    """The kernels of `native` that are available to this process at present.

    No step waits for a compiler, unless steps are to wait for everything that they need (`Environment.wait`). In a run
    that lasts for a while, another process compiles the kernels after the graphs.
    """

    def __init__(self) -> None:
        self._settled = not can_run()
        self._module: ModuleType | None = None
        self._since: float | None = None
        self._started = False
        self._next_look = 0.0

    def get(self) -> ModuleType | None:
        """Return the module, or None if there is none, or none yet."""
        if self._settled:
            return self._module
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._look(now - self._since)
        return self._module

    def _look(self, seconds: float) -> None:
        if native.is_built() or Environment.read().wait:
            module = native.load()
            self._module = module if module is not None and module.varlen_attention_is_supported() else None
            self._settled = True
        elif native.failed() is not None or (self._started and not native.builds_in_background()):
            self._settled = True  # no second try: `deepytorch doctor` says why, or that it is not compiled
        elif not self._started and seconds >= _PATIENCE_SECONDS and not background.is_working():
            self._started = True
            native.build_in_background()


KERNELS = Kernels()
