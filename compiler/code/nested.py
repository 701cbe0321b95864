"""The nested compilation of a graph: by a `torch.compile` of its own, with guards of its own, inside Dynamo's graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.dynamo.sizes import is_marked, mark_alias
from deepytorch.torch_internals import compile_by_frames, functorch_config

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Compiled = Callable[..., Sequence[Any]]


def compile_nested(
    module: fx.GraphModule,
    backend: Backend,
    arguments: Sequence[Any],
    varying: Sequence[tuple[int, ...]],
    may_recompile: Callable[[], bool] = lambda: True,
) -> tuple[Compiled, Sequence[Any]]:
    """Compile a graph; return a function that calls it from now on, and its outputs for these arguments.

    varying: the dimensions of each argument that vary from call to call. may_recompile: whether training may wait for a
    compile that later arguments need (sizes of 0 and 1 are compiled for themselves); else such calls run in eager.
    """
    call, first = _nested(module, backend, arguments, varying, may_recompile)
    return call, first()


def prepare_nested(
    module: fx.GraphModule,
    backend: Backend,
    arguments: Sequence[Any],
    varying: Sequence[tuple[int, ...]],
    may_recompile: Callable[[], bool] = lambda: True,
) -> Compiled:
    """Compile a graph for arguments like these, and run nothing; return a function that calls it from now on.

    The script's stance of `torch.compile` is ignored. Errors of compiling are raised, and nothing has run then either.
    """
    only_compiles = True

    def backend_that_stops(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        run = backend(traced, example_inputs)

        def run_later(*arguments: Any) -> Sequence[Any]:
            if only_compiles:
                raise _Compiled
            return run(*arguments)

        return run_later

    call, first = _nested(module, backend_that_stops, arguments, varying, may_recompile)
    try:
        with torch.compiler.set_stance("default"):  # under another stance the graph may run in eager
            first()
    except _Compiled:
        only_compiles = False
        return call
    raise RuntimeError("the graph was not compiled: Dynamo ran it in eager")


class _Compiled(Exception):
    """An exception that ends a call once its graph is compiled, so that nothing runs."""


class _PutOff(Exception):
    """An exception for a graph that would have to be compiled anew when training cannot wait for it."""


class _RecompileGate:
    """The gate before Dynamo's callback of a nested graph: it lets the first compile pass, later ones if affordable."""

    def __init__(self, traces: Callable[..., Any], may_recompile: Callable[[], bool]) -> None:
        self._torchdynamo_orig_backend = traces  # under this name Dynamo looks for the backend behind a callback
        self._may_recompile, self._has_compiled = may_recompile, False

    def __call__(self, *frame: Any) -> Any:
        if self._has_compiled and not self._may_recompile():
            raise _PutOff
        self._has_compiled = True
        with BUDGET.pause():
            return self._torchdynamo_orig_backend(*frame)


_ENTER = re.compile(r"^\w+ = torch\.amp\.autocast_mode\._enter_autocast\((.*)\)(.*)$")
_EXIT = re.compile(r"^\w+ = torch\.amp\.autocast_mode\._exit_autocast\((\w+)\)(.*)$")


def _with_blocks(body: list[str]) -> list[str]:
    """Return the code of a graph with `with torch.autocast(...)` in place of calls that enter and leave autocast.

    Dynamo of torch 2.11 does not trace such calls: it executes them.
    """
    made, depth = [], 0
    for line in "".join(body).splitlines():
        entered, left = _ENTER.match(line), _EXIT.match(line)
        if entered:
            made.append(f"{_INDENT * depth}with torch.autocast({entered[1]}):")
            depth += 1
            made.append(f"{_INDENT * depth}pass")  # there may be no call inside
            continue
        if left:
            depth -= 1
        else:
            made.append(_INDENT * depth + line)
    return [f"{line}\n" for line in made]


_INDENT = "    "


def _nested(
    module: fx.GraphModule,
    backend: Backend,
    arguments: Sequence[Any],
    varying: Sequence[tuple[int, ...]],
    may_recompile: Callable[[], bool],
) -> tuple[Compiled, Callable[[], Sequence[Any]]]:
    """Return a function that calls the graph from now on, and a function for the first call, which compiles it."""
    # Dynamo never enters code that was generated while Dynamo was compiling, so the code is generated again.
    with module.graph.on_generate_code(lambda _: _with_blocks):
        module.recompile()

    def both(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        # Lower the backward at once, as in the worker, where no backward comes: the setting is part of the cache's key.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return backend(traced, example_inputs)

    context = compile_by_frames(backend=both, nopython=True)
    context.callback = _RecompileGate(context.callback, may_recompile)
    compiled = context(module.forward)
    marked = [mark_alias(value, dims) if dims else value for value, dims in zip(arguments, varying, strict=True)]

    varied = [(place, dims) for place, dims in enumerate(varying) if dims]

    def call(*arguments: Any) -> Sequence[Any]:
        # Dynamo guards marks, too: an alias hides those that a batch comes with, which do not matter to this graph.
        given = list(arguments)
        for place, dims in varied:
            if vars(given[place]) and is_marked(given[place]):
                given[place] = mark_alias(given[place], dims)
        try:
            return compiled(*given)
        except _PutOff:
            return module.forward(*arguments)

    def first() -> Sequence[Any]:
        try:
            return compiled(*marked)
        except _PutOff:  # another thread has compiled it meanwhile, for other sizes
            return module.forward(*marked)

    return call, first
