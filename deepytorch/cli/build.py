"""`deepytorch build`: native code, compiled ahead of its first use."""

from __future__ import annotations

from rich.console import Console


def build() -> None:
    """Compile the C++ code of the deepytorch process group now, not in the first script that uses it.

    Takes half a minute on two cores, once for each version of torch. What was compiled is kept in the cache folder.
    """
    from deepytorch.comm.group.native import build as build_native

    Console().print(f"compiled: {build_native()}", soft_wrap=True)
