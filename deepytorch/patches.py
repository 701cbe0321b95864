"""Changes of other libraries, in one ledger, which `deepytorch doctor` lists and `deepytorch.disable()` undoes.

No other code assigns to objects that deepytorch does not own. Wrappers look at `SWITCH` before they decide something: a
wrapper that somebody else has wrapped in turn cannot be removed any more, and then only hands calls on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from deepytorch.switch import SWITCH

_ABSENT = object()
_LOCK = threading.RLock()


@dataclass(eq=False)
class Patch:
    """One change.

    Attributes:
        where: The dotted name of the changed object.
        why: The purpose, in a line.
        apply: Makes the change; may be called again after `undo`.
        undo: Undoes the change; may be called again after `apply`. Returns False if the change cannot be undone.
        applied: Whether the change is made.
    """

    where: str
    why: str
    apply: Callable[[], object]
    undo: Callable[[], bool | None]
    applied: bool = False


_LEDGER: dict[str, Patch] = {}


def ledger() -> tuple[Patch, ...]:
    """Return every change that was made or is to be made, in the order in which they were asked for."""
    with _LOCK:
        return tuple(_LEDGER.values())


def patch(
    where: str, why: str, apply: Callable[[], object], undo: Callable[[], bool | None], *, always: bool = False
) -> Patch:
    """Make a change, unless it is made; return its entry in the ledger.

    always: even while disabled, for models that the user compiled by name.
    """
    with _LOCK:
        entry = _LEDGER.setdefault(where, Patch(where, why, apply, undo))
        if not entry.applied and (SWITCH.enabled or always):
            entry.apply()
            entry.applied = True
        return entry


def replace(owner: Any, name: str, make: Callable[[Any], Any], why: str, *, always: bool = False) -> Patch:
    """Replace the attribute `name` of a module or class by `make(original)`, once. always: as in `patch`.

    A function that `make` returns gets the name and docstring of the original.
    """
    own, original = vars(owner).get(name, _ABSENT), getattr(owner, name)
    made: Any = None

    def apply() -> None:
        nonlocal made
        if made is None:
            made = make(original)
            if isinstance(made, FunctionType):
                functools.update_wrapper(made, original)
        setattr(owner, name, made)

    def undo() -> bool:
        if vars(owner).get(name) is not made:
            return False
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        return True

    prefix = getattr(owner, "__module__", None)
    path = owner.__name__ if prefix is None else f"{prefix}.{owner.__qualname__}"
    return patch(f"{path}.{name}", why, apply, undo, always=always)


def listen(
    register: Callable[[Any], Any], function: Callable[..., Any], why: str, farewell: Callable[[], object]
) -> Patch:
    """Have torch call `function`, even while disabled: `register(function)` returns a handle with `remove()`.

    farewell: called before torch stops calling.
    """
    handle: Any = None

    def apply() -> None:
        nonlocal handle
        handle = register(function)

    def undo() -> None:
        farewell()
        handle.remove()

    where = f"{register.__module__}.{register.__qualname__}({function.__module__}.{function.__qualname__})"
    return patch(where, why, apply, undo, always=True)


def undo_all() -> None:
    """Undo every change, the last one first."""
    with _LOCK:
        for entry in reversed(ledger()):
            if entry.applied:
                entry.applied = entry.undo() is False


def apply_all() -> None:
    """Make every change again that was asked for."""
    with _LOCK:
        for entry in ledger():
            if not entry.applied:
                entry.apply()
                entry.applied = True


def forget(where: str) -> None:
    """Remove a change from the ledger, since the changed object has gone."""
    with _LOCK:
        _LEDGER.pop(where, None)
