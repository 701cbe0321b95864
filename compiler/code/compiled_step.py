"""The compiled step: a graph that is compiled at its first call, with sizes that vary between batches as symbols.

A nested `torch.compile` with guards of its own compiles the graph, so that Dynamo's graph around it is not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.compilers import IN_PLACE, WORKER, Compiler, Graph, compile_seconds
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.nested import compile_nested, prepare_nested
from deepytorch.compiler.code.worker import keys
from deepytorch.compiler.code.worker.queue import HERE, Compilation, differences_of_key
from deepytorch.compiler.dynamo.trace_gate import current_trace
from deepytorch.compiler.report import RegionRecord
from deepytorch.fused_optimizers import fuse_for
from deepytorch.log import logger, once
from deepytorch.patches import listen
from deepytorch.process_facts import seconds_since_start
from deepytorch.torch_internals import OpOverload, compiler_counters

CALLS_A_STEP = 256  # a script with more calls than this has an optimizer that torch does not know


class CompiledStep:
    """A graph that is compiled at its first call, with the sizes that vary marked.

    varying: the dimensions of each argument that vary from batch to batch.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        varying: Sequence[tuple[int, ...]],
        lowering: RegionLowering,
        record: RegionRecord,
    ) -> None:
        self._module, self._varying, self._lowering, self._record = module, varying, lowering, record
        self.compiles = 0  # so far
        self._compiled: Callable[..., Any] | None = None
        self._compilation: Compilation | None = None
        self._is_budgeted = current_trace() is not None  # else somebody has asked for `torch.compile`
        self._boundary, self._calls = StepBoundary(), 0  # of the script's steps; calls since its code is there
        self._is_there = self._begun = self._failed = False
        self._waits, self._from_sizes = lowering.config.waits, lowering.config.compiles_from_sizes
        self._graph = Graph(record.name, module, varying, lowering, self._prepare)
        self._compiler: Compiler = WORKER
        self.recomputes = recomputes(module)

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run compiled code; compile it here and now if it is not yet compiled: see `poll`."""
        if torch.is_grad_enabled():
            fuse_for(arguments)
        if self._compiled is None and self._lowering.config.lowering == "eager":
            self._compiled = self._module.forward
            self.compiles, self._record.compiles = self.compiles + 1, self._record.compiles + 1
        if self._compiled is None:
            started = time.perf_counter()
            with BUDGET.pause():
                self._compiled, outputs = compile_nested(
                    self._module, self._backend, arguments, self._varying, self._may_recompile
                )
            self._record.compile_seconds += time.perf_counter() - started
            return outputs
        return self._compiled(*arguments)

    def in_eager(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the graph operator by operator."""
        return tuple(self._module.forward(*arguments))

    def poll(self, arguments: Sequence[Any]) -> bool:
        """Advance the compilation: in the background, see [Note: The compile process], or here if that is not possible.

        Return whether a call with these arguments is to run compiled code now: the code is compiled, the takeover of
        gradients is done on all ranks if there will be one, and a step of the script begins. Always True if steps wait
        until they are compiled.
        """
        if self._begun or self._waits:
            return True
        if self._failed:
            return False
        if self._compilation is None:
            self._start(arguments)
        assert self._compilation is not None
        if not self._is_there:
            if not self._compiler.poll(self._graph, self._compilation, arguments, self._affords):
                return False
            self._is_there = True
            self._record.compile_seconds += self._compilation.seconds if self._compilation.where == HERE else 0.0
        if self._compilation.error is not None and self._compiler is WORKER and self._is_for_gpu(arguments):
            self._record.compiled_here.append(f"another process could not: {self._compilation.error}")
            self._is_there = False
            self._start(arguments, (IN_PLACE,))  # as for a GPU otherwise
        elif self._compilation.error is not None:
            self._give_up(self._compilation.error)
        elif self._is_at_boundary() and self._lowering.may_begin():
            self._begin(self._compilation)
        return self._begun

    def _is_for_gpu(self, arguments: Sequence[Any]) -> bool:
        """Return whether this process would have compiled the graph if no other could, and training waited for it."""
        return self._from_sizes and any(isinstance(each, torch.Tensor) and each.is_cuda for each in arguments)

    def _start(self, arguments: Sequence[Any], compilers: Sequence[Compiler] = (WORKER, IN_PLACE)) -> None:
        """Have the graph compiled: in the background, else in place."""
        for self._compiler in compilers:
            self._compilation = self._compiler.start(self._graph, arguments)
            if self._compilation is not None:
                return

    def _prepare(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph in this process, and run nothing."""
        return prepare_nested(self._module, self._backend, arguments, self._varying, self._may_recompile)

    def _expects_hit(self) -> bool:
        """Return whether another process has just compiled what is to be compiled, and differences are to be told."""
        compilation = self._compilation
        return self._from_sizes and not self.compiles and compilation is not None and compilation.where != HERE

    def _may_recompile(self) -> bool:
        return self._affords(compile_seconds(self._module))

    def _affords(self, seconds: float) -> bool:
        return not self._is_budgeted or BUDGET.affords(seconds)

    def _begin(self, compilation: Compilation) -> None:
        self._begun, self._compiled, record = True, compilation.compiled, self._record
        record.change_over_seconds = seconds_since_start()
        record.compile_seconds_in_background += 0.0 if compilation.where == HERE else compilation.seconds
        record.compile_peak_mb_in_background = max(record.compile_peak_mb_in_background, compilation.peak_mb)
        record.compiled_by = compilation.where
        logger.info(
            "%s runs compiled from now on, %.1f s after the process began (compiled by %s in %.1f s)",
            record.name,
            record.change_over_seconds,
            compilation.where,
            compilation.seconds,
        )

    def _is_at_boundary(self) -> bool:
        """Return whether the script is at an optimizer-step boundary, and not between parts of an accumulated step."""
        self._calls += 1
        return self._boundary.passed() or self._calls > CALLS_A_STEP or not torch.is_grad_enabled()

    def _give_up(self, error: str) -> None:
        """Report that the graph could not be compiled; it goes on in eager."""
        self._failed = True
        message = f"{self._record.name}: compiling failed ({error})"
        self._record.fallbacks.append(message)
        once(logging.WARNING, "%s; it goes on in eager", message)
        self._lowering.failed()

    def _backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _carry_tags(self._module.graph, module.graph)
        known = compiler_counters["aot_autograd"]["autograd_cache_hit"]
        with keys.seen(self._expects_hit()) as key:
            compiled = self._lowering.compile(module, example_inputs)
        if compiler_counters["aot_autograd"]["autograd_cache_hit"] == known:
            if self._expects_hit() and self._compilation is not None:
                told = "; ".join(differences_of_key(self._compilation, key))
                self._record.compiled_here.append(f"the key that another process gave it was not found: {told}")
            self._record.compiles += 1
            self._record.recompiles += self.compiles > 0
        self.compiles += 1
        return compiled


def recomputes(module: fx.GraphModule) -> bool:
    """Return whether parts of a graph are to be computed again in the backward: eager would keep all of it."""
    return any("recompute" in node.meta for node in module.graph.nodes)


def _carry_tags(source: fx.Graph, traced: fx.Graph) -> None:
    """Give the tags of activation checkpointing to Dynamo's trace of `source`, which went through generated code."""
    tagged, untagged = _operator_calls(source), _operator_calls(traced)
    if not any("recompute" in node.meta for node in tagged):
        return
    if [node.target for node in tagged] != [node.target for node in untagged]:
        once(logging.WARNING, "activation checkpointing was lost on the way: more memory may be used")
        return
    for node, other in zip(tagged, untagged, strict=True):
        for name in ("recompute", "ac_graph_id"):
            if name in node.meta:
                other.meta[name] = node.meta[name]


def _operator_calls(graph: fx.Graph) -> list[fx.Node]:
    sizes = torch.ops.aten.sym_size.int
    return [n for n in graph.nodes if isinstance(n.target, OpOverload) and n.target is not sizes]


# ---------------------------------------------------------------------- optimizer steps

_taken = 0


def _count(*_: Any) -> None:
    global _taken
    _taken += 1


def _forget() -> None:
    """Do nothing when torch stops calling `_count`."""


def _steps_taken() -> int:
    """Return the number of steps of all optimizers of this process since the first call of this function."""
    listen(register_optimizer_step_post_hook, _count, "see where a step of the script's begins", _forget)
    return _taken


class StepBoundary:
    """A detector of optimizer-step boundaries."""

    def __init__(self) -> None:
        self._seen = _steps_taken()

    def passed(self) -> bool:
        """Return whether an optimizer has stepped since the last call of this, or since the detector was made."""
        before, self._seen = self._seen, _steps_taken()
        return self._seen != before
