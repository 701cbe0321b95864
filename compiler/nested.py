"""A graph compiled by a `torch.compile` of its own, with guards of its own, inside of what Dynamo traced around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.dynamic_sizes import is_marked, mark_alias
from deepytorch.torch_internals import functorch_config

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Compiled = Callable[..., Sequence[Any]]


def compile_nested(
    module: fx.GraphModule, backend: Backend, arguments: Sequence[Any], varying: Sequence[tuple[int, ...]]
) -> tuple[Compiled, Sequence[Any]]:
    """What calls the compiled graph from now on, and what it gives for these arguments.

    varying: for every argument the dimensions that vary from call to call.
    """
    call, first = _nested(module, backend, arguments, varying)
    return call, first()


def prepare_nested(
    module: fx.GraphModule, backend: Backend, arguments: Sequence[Any], varying: Sequence[tuple[int, ...]]
) -> Compiled:
    """What calls the compiled graph from now on, compiled for such arguments, whatever stance the script has told
    `torch.compile` to take. Nothing has run, not either where this raises what compiling raises.
    """
    only_compiles = True

    def backend_that_stops(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        run = backend(traced, example_inputs)

        def run_later(*arguments: Any) -> Sequence[Any]:
            if only_compiles:
                raise _Compiled
            return run(*arguments)

        return run_later

    call, first = _nested(module, backend_that_stops, arguments, varying)
    try:
        with torch.compiler.set_stance("default"):  # under others it may be run in eager
            first()
    except _Compiled:
        only_compiles = False
        return call
    raise RuntimeError("the graph was not compiled: Dynamo ran it in eager")


class _Compiled(Exception):
    """The graph is compiled, and not to be run."""


def _nested(
    module: fx.GraphModule, backend: Backend, arguments: Sequence[Any], varying: Sequence[tuple[int, ...]]
) -> tuple[Compiled, Callable[[], Sequence[Any]]]:
    """What calls the graph from now on; and the first call, which compiles it."""
    # Dynamo never enters code that was generated while it was compiling, so it is generated again.
    module.recompile()

    def both(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        # The backward at once, as beside, where there is none to wait for: it is part of the cache's key.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return backend(traced, example_inputs)

    compiled = torch.compile(module.forward, backend=both, fullgraph=True)
    marked = [mark_alias(value, dims) if dims else value for value, dims in zip(arguments, varying, strict=True)]

    def call(*arguments: Any) -> Sequence[Any]:
        # Dynamo guards marks, too: those that a batch comes with make no difference to this graph.
        given = zip(arguments, varying, strict=True)
        return compiled(*[mark_alias(value, dims) if dims and is_marked(value) else value for value, dims in given])

    return call, lambda: compiled(*marked)
