"""The number of a DistributedDataParallel module within its group, and what the module does with outputs.

The number is the same on all ranks, which make modules together. Later events would not do as a name, since ranks may
differ in them: one may never compile the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepytorch.patches import replace

_MADE: Counter[str] = Counter()  # modules of each group, by its name
_ATTRIBUTE = "_deepytorch_place"


@dataclass(frozen=True)
class _Place:
    name: str

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy is another module, which other ranks may not have


def number_modules(parallel: Any) -> None:
    """Give each module that is made from now on a number. parallel: torch.nn.parallel.distributed."""
    replace(parallel.DistributedDataParallel, "__init__", _numbered, "number them alike on all ranks", always=True)


def place_of(ddp: Any) -> str | None:
    """Return the module's name within its group; None for a copy of another module.

    A module that was made before modules were numbered gets its number at the first call of this. The number is the
    same on ranks that ask for the same modules.
    """
    if _ATTRIBUTE not in vars(ddp):
        _number(ddp, "old ")
    place = vars(ddp)[_ATTRIBUTE]
    return None if place is None else str(place.name)


def copies_outputs(ddp: Any) -> bool:
    """Return whether DDP passes a forward's outputs through a node of its own, which looks at their graph.

    DDP does so to find unused parameters, and in a static graph's first step; not once deepytorch reduces gradients.
    """
    if ddp.static_graph:
        return not ddp._static_graph_delay_allreduce_enqueued
    return bool(ddp.find_unused_parameters)


def _number(ddp: Any, kind: str = "") -> None:
    group = kind + ddp.process_group.group_name
    _MADE[group] += 1
    object.__setattr__(ddp, _ATTRIBUTE, _Place(f"{kind}ddp{_MADE[group]} of group {ddp.process_group.group_name}"))


def _numbered(original: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self)

    return make
