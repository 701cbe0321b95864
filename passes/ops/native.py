"""The C++ of `csrc`: attention over packed rows on a CPU, used from when it is compiled on."""

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
    # Loops become vector instructions where comparisons may be done ahead and `errno` is not set; numbers stay as they
    # are, NaN and infinities too. Of OpenMP only the header of `at::parallel_for` has need: torch has the library.
    flags=("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-mprefer-vector-width=512"),
    alone=("bindings",),
)

_PATIENCE_SECONDS = 60.0  # a compiler takes 15 s of a core, which a shorter run would not win back
_LOOK_SECONDS = 1.0


def can_build() -> bool:
    """Whether the C++ is for machines of this kind."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def can_run() -> bool:
    """Whether this CPU has the instructions that the kernels and the products of oneDNN below them are made of."""
    return can_build() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class Kernels:
    """What `native` has to offer to this process by now.

    Nothing waits for a compiler, unless steps are to wait for all that they need (`Environment.wait`). In a run that
    goes on for a while another process compiles, after the graphs.
    """

    def __init__(self) -> None:
        self._settled = not can_run()
        self._module: ModuleType | None = None
        self._since: float | None = None
        self._started = False
        self._next_look = 0.0

    def get(self) -> ModuleType | None:
        """The module; None where there is none, or none yet."""
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
        elif native.failed() is not None or (self._started and not native.builds_beside()):
            self._settled = True  # `deepytorch doctor` says why, or that it is not compiled: once is enough
        elif not self._started and seconds >= _PATIENCE_SECONDS and not background.is_working():
            self._started = True
            native.build_beside()


KERNELS = Kernels()
