"""The reducers of this process, by the name under which compiled graphs hand them gradients.

Modules that hold the same parameters share a name, so that a graph serves each of them: see [Note: Wrapped again] in
`compiler.code.data_parallel`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from deepytorch.comm.gradients.reducer import GradientReducer
from deepytorch.errors import GradientError

# The last one of a name is in use. A reducer lives as long as its module, or code that was compiled in it.
_REDUCERS: dict[str, list[weakref.ref[GradientReducer]]] = {}


def register(reducer: GradientReducer) -> str:
    """Return the name of a new reducer's gradients: that of a reducer of the same parameters, or else its own."""
    for name in _REDUCERS:
        if any(_have_same_parameters(each, reducer) for each in _alive(name)):
            _REDUCERS[name].insert(0, weakref.ref(reducer))
            return name
    _REDUCERS[reducer.name] = [weakref.ref(reducer)]
    return reducer.name


def arm(name: str, reducer: GradientReducer) -> None:
    """Have the next backward reduced by this reducer, to which graphs hand the gradients of that name from now on."""
    if _REDUCERS[name][-1]() is not reducer:
        _REDUCERS[name] = [weakref.ref(each) for each in _alive(name) if each is not reducer] + [weakref.ref(reducer)]
    reducer.arm()


def give_up(parameters: Sequence[Any]) -> list[GradientReducer]:
    """Have reducers that hold any of these parameters reduce no more; return them.

    A reducer of no other parameters stops at once, others stop after the backward that is awaited.
    """
    taking = [each for each in reducers() if each.is_ours]
    ids = {id(each) for each in parameters} if taking else set()
    found = [each for each in taking if not ids.isdisjoint(map(id, each.parameters))]
    for each in found:
        if ids.issuperset(map(id, each.parameters)):
            each.disarm()
        each.release()
    return found


def find(name: str) -> GradientReducer:
    """Return the reducer of that name that is in use.

    Raises:
        GradientError: No reducer of that name is alive.
    """
    found = _alive(name)
    if not found:
        raise GradientError(f"the gradients {name!r} belong to no DistributedDataParallel module that is alive")
    return found[-1]


def reducers() -> list[GradientReducer]:
    """Return all reducers that are alive."""
    return [each for name in _REDUCERS for each in _alive(name)]


@contextmanager
def without_gradients(parameters: Sequence[Any]) -> Iterator[None]:
    """Ignore, inside the block and in all reducers, the gradients that an autograd node gives for these parameters."""
    with ExitStack() as stack:
        for each in reducers():
            stack.enter_context(each.without(parameters))
        yield


def _alive(name: str) -> list[GradientReducer]:
    return [found for each in _REDUCERS.get(name, ()) if (found := each()) is not None]


def _have_same_parameters(one: GradientReducer, other: GradientReducer) -> bool:
    return [id(each) for each in one.parameters] == [id(each) for each in other.parameters]
