"""The two compilers of a graph: a process in the background, and this process while training waits.

Both are started with a graph and the arguments of a call, and polled at later calls. Neither runs the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.worker.graph_data import CannotSend
from deepytorch.compiler.code.worker.queue import HERE, Compilation, compile_in_worker, expect_no_longer
from deepytorch.log import logger

# Guesses on the high side of what stops training, by the nodes of a graph: Inductor in this process, of which a small
# model took 8 to 25 s on 2 cores; and loading what another process has compiled, 1 to 2 s of a Llama of four layers.
_COMPILE_SECONDS, _COMPILE_SECONDS_A_NODE = 10.0, 0.1
_LOAD_SECONDS, _LOAD_SECONDS_A_NODE = 1.0, 0.005

Affords = Callable[[float], bool]


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph to compile.

    varying: for every argument the dimensions that vary from call to call. compile: compiles the graph for arguments
    like these in this process, and returns what runs it.
    """

    name: str
    module: fx.GraphModule
    varying: Sequence[tuple[int, ...]]
    lowering: RegionLowering
    compile: Callable[[Sequence[Any]], Callable[..., Any]]


class Compiler(Protocol):
    """Something that compiles graphs."""

    def start(self, graph: Graph, arguments: Sequence[Any]) -> Compilation | None:
        """Begin with a graph that is to run with arguments like these; return None where it cannot be compiled so."""
        ...

    def poll(self, graph: Graph, compilation: Compilation, arguments: Sequence[Any], affords: Affords) -> bool:
        """Go on, as far as training may wait for it; return whether the graph can run compiled, or has an error.

        affords: whether training may wait for so many seconds.
        """
        ...


class Worker:
    """A process in the background, see [Note: The compile process]."""

    def start(self, graph: Graph, arguments: Sequence[Any]) -> Compilation | None:
        try:
            return compile_in_worker(graph.name, graph.module, list(arguments), graph.varying, graph.lowering)
        except CannotSend as reason:
            logger.info("%s cannot be compiled in the background: %s", graph.name, reason)
            expect_no_longer()
            return None

    def poll(self, graph: Graph, compilation: Compilation, arguments: Sequence[Any], affords: Affords) -> bool:
        if not compilation.done.is_set():
            return False
        return compilation.error is not None or affords(_LOAD_SECONDS + _LOAD_SECONDS_A_NODE * _num_nodes(graph.module))


class InPlace:
    """A compiler in this process, for which training waits, as with `torch.compile`.

    A thread would not make training wait. But while torch compiles it replaces `nn.Module.__call__` for all threads,
    and in the end gives random generators back the state from before: dropout of the steps meanwhile would come again.
    """

    def start(self, graph: Graph, arguments: Sequence[Any]) -> Compilation | None:
        return Compilation(graph.name, where=HERE)

    def poll(self, graph: Graph, compilation: Compilation, arguments: Sequence[Any], affords: Affords) -> bool:
        if compilation.done.is_set():
            return True
        if not affords(compile_seconds(graph.module)):
            return False
        started = time.perf_counter()
        logger.info("%s is compiled now, and training waits for it", graph.name)
        error = None
        try:
            with BUDGET.pause():
                compilation.compiled = graph.compile(list(arguments))
        except Exception as failure:
            logger.debug("traceback of the failure", exc_info=True)
            error = f"{type(failure).__name__}: {str(failure)[:500]}"
        compilation.finish(error, seconds=time.perf_counter() - started)
        return True


def compile_seconds(module: fx.GraphModule) -> float:
    """Return a guess of how many seconds compiling a graph in this process takes."""
    return _COMPILE_SECONDS + _COMPILE_SECONDS_A_NODE * _num_nodes(module)


def _num_nodes(module: fx.GraphModule) -> int:
    return sum(len(part.graph.nodes) for part in module.modules() if isinstance(part, fx.GraphModule))


WORKER, IN_PLACE = Worker(), InPlace()
