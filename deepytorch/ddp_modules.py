"""Which of its group's DistributedDataParallel modules one is: the same on all its ranks, which make them together.

What ranks see of a module later is not alike: one may never compile it.
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
        return type(None), ()  # a copy of the module is another one, which other ranks may not have


def number_modules(parallel: Any) -> None:
    """Number the modules that are made from now on. parallel: torch.nn.parallel.distributed."""
    replace(parallel.DistributedDataParallel, "__init__", _numbered, "number them alike on all ranks", always=True)


def place_of(ddp: Any) -> str | None:
    """The module's name among those of its group; None for a copy of another one.

    One that was made before anything was numbered is numbered when this is asked first, which is alike on ranks that
    ask for the same ones.
    """
    if _ATTRIBUTE not in vars(ddp):
        _number(ddp, "old ")
    place = vars(ddp)[_ATTRIBUTE]
    return None if place is None else str(place.name)


def _number(ddp: Any, kind: str = "") -> None:
    group = kind + ddp.process_group.group_name
    _MADE[group] += 1
    object.__setattr__(ddp, _ATTRIBUTE, _Place(f"{kind}ddp{_MADE[group]} of group {ddp.process_group.group_name}"))


def _numbered(original: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self)

    return make
