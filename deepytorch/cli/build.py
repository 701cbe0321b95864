"""`deepytorch build`: native code, compiled ahead of its first use."""

from __future__ import annotations

from rich.console import Console


def build() -> None:
    """Compile the C++ code of the deepytorch process group and of attention on a CPU now, ahead of a first script.

    This takes most of a minute on two cores, once for each version of torch. The cache folder keeps the compiled code.
    """
    from deepytorch.comm.group.native import native as collectives
    from deepytorch.passes.ops.native import can_run
    from deepytorch.passes.ops.native import native as operators

    for extension in (collectives, operators) if can_run() else (collectives,):
        Console().print(f"compiled: {extension.build()}", soft_wrap=True)
