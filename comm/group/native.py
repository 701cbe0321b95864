"""The C++ of `csrc`: the collectives of the process group."""

from __future__ import annotations

from pathlib import Path

from deepytorch.extension import Extension

# Each kernel is compiled alone, for its instruction set; the bindings too, so that two cores get equal work.
native = Extension(
    "deepytorch_comm",
    Path(__file__).parents[1],
    what="collectives",
    without="the deepytorch process group runs on stock gloo and nccl",
    alone=("bindings", "kernels"),
)
