"""A fault of Inductor that gives wrong numbers, mended until torch has done so."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch.patches import replace


def mend() -> None:
    """Keep a node's order behind a write, when Inductor computes the node's loops anew to fuse it (on a CPU).

    A buffer that was written in place (by `index_put`) has another name from then on, and who reads it waits for the
    write by that name. `recompute_size_and_body` reads the names from the loops again, which have the old one: the
    reader could then run before the write. Torch 2.13 forgets the new name for readers without other dependencies. 2.11
    does so for all by its source, but gave right numbers where 2.13 gave wrong ones.
    """
    from deepytorch.torch_internals import inductor_scheduler

    replace(
        inductor_scheduler.SchedulerNode,
        "recompute_size_and_body",
        _keeping_dependencies,
        "keep a node behind the write that it reads when Inductor computes its loops anew",
        always=True,
    )


@functools.cache
def digest() -> str:
    """Return a digest of this file, for the keys of compiled code: code from before a fault was mended is not used."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _keeping_dependencies(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepytorch.torch_internals import inductor_dependencies

    only_order = (inductor_dependencies.WeakDep, inductor_dependencies.StarDep)

    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        kept = [each for each in node.read_writes.reads if isinstance(each, only_order)]
        original(node, *args, **kwargs)
        found = node.read_writes
        for each in kept:
            found = found.with_read(each)
        node.set_read_writes(found.rename(node.mutation_renames))

    return recompute_size_and_body
