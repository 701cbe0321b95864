"""The passes of a plan, and the manager that runs them: contracts, lint, timing and graph dumps.

A pass that fails leaves the graph as it was.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from deepytorch.compiler.dynamo.graph_values import give_values
from deepytorch.compiler.plan import Plan
from deepytorch.log import logger, once
from deepytorch.passes.base import Context, Decline, Pass, Rewrite
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.unpad.program import Program
from deepytorch.passes.unpad.strip_padding import StripPadding


@dataclass(frozen=True)
class PassRun:
    """One pass over one graph: its rewrite, and the wall time that it took."""

    name: str
    rewrite: Rewrite
    time_ms: float
    error: str | None = None  # the type and message of the exception that ended it

    @property
    def fired(self) -> bool:
        """Return whether the pass has changed the graph."""
        return self.rewrite.fired


@dataclass(frozen=True)
class Rewritten:
    """The result of passes over a graph.

    program: given if a pass fired whose graph is for some batches only: the program for these batches. before: the
    graph before that pass, for all other batches, or else before the first pass that fired. alone: the graph of that
    pass without the passes behind it, if any of these fired.
    """

    runs: tuple[PassRun, ...]
    program: Program | None = None
    before: fx.GraphModule | None = None
    alone: fx.GraphModule | None = None

    @property
    def fired(self) -> bool:
        """Return whether any pass has changed the graph."""
        return any(run.fired for run in self.runs)

    @property
    def of_any_batch(self) -> list[str]:
        """Return the names of the passes that have changed the graph for all batches alike."""
        return [run.name for run in self.runs if run.fired and run.rewrite.program is None]

    @property
    def reasons(self) -> list[str]:
        """Return what was declined, with the place and the reason."""
        return [f"{decline.where}: {decline.reason}" for run in self.runs for decline in run.rewrite.declined]


def passes_for(plan: Plan) -> list[Pass]:
    """Return the passes of `plan`, in order."""
    config = plan.config
    passes: list[Pass] = [
        StripPadding(loss_rows=config.loss_rows, defer_outputs=config.defer_outputs),
        # behind StripPadding, after which only the loss reads the logits of a Hugging Face model
        FuseLinearLoss() if config.fuse_loss else FuseLinearLoss(least_bytes=None),
    ]
    unknown = set(plan.passes) - {type(each).__name__ for each in passes}
    assert not unknown, f"a plan asks for {sorted(unknown)}, which no pass is called"
    return [each for each in passes if type(each).__name__ in plan.passes]


def run_passes(
    module: fx.GraphModule, passes: Sequence[Pass], context: Context, *, dump_dir: str | Path | None = None
) -> Rewritten:
    """Run `passes` over `module`, in place and in order, and return what each did.

    A pass whose requirement an earlier pass declined to provide is skipped. A pass that raises, or leaves a graph that
    does not lint, is undone: the module has an equal graph of new nodes then, and the pass counts as declined.
    With `dump_dir`, the graph goes to numbered files there before and after each pass.
    """
    _check_order(passes)
    dump = _Dump(Path(dump_dir)) if dump_dir is not None else None
    provided: set[str] = set()
    runs: list[PassRun] = []
    depends, program, before, alone = False, None, None, None
    valued = True  # every node has its value
    for each in passes:
        name = type(each).__name__
        missing = sorted(each.requires - provided)
        if missing:
            reason = f"needs {', '.join(missing)}, which an earlier pass declined to provide"
            runs.append(PassRun(name, Rewrite(declined=[Decline(name, reason)]), 0.0))
            continue
        if not each.concerns(module):
            continue
        if dump:
            dump.write(module, name, "before")
        before_it = _State(module)
        run = _run(each, module, context, valued, before_it)
        if run.error is None:
            valued = not run.fired
        if dump:
            dump.write(module, name, "after" if run.fired else "after-unchanged")
        if run.fired:
            provided |= each.provides
            earlier = before_it.module(module)
            if each.depends_on_batch:
                assert not depends, f"{name} and a pass before it both depend on the batch"
                depends, program, before = True, run.rewrite.program, earlier
            elif depends:
                alone = alone or earlier
            else:
                before = before or earlier
        runs.append(run)
    return Rewritten(tuple(runs), program, before, alone)


def _check_order(passes: Sequence[Pass]) -> None:
    promised: set[str] = set()
    for each in passes:
        missing = each.requires - promised
        assert not missing, f"{type(each).__name__} requires {sorted(missing)}, which no pass before it provides"
        promised |= each.provides


def _run(each: Pass, module: fx.GraphModule, context: Context, valued: bool, before: _State) -> PassRun:
    """Run one pass, and undo it if it fails. valued: whether every node has its value; else values are set first."""
    name = type(each).__name__
    start = time.perf_counter()
    error = None
    try:
        if not valued:
            give_values(module)
        rewrite = each.rewrite(module, context)
        if rewrite.fired:
            module.graph.lint()
            module.recompile()
        elif before.differs(module):
            logger.debug("%s declined after it had begun to rewrite; undone", name)
            before.restore(module)
    except Exception as exception:
        before.restore(module)
        error = f"{type(exception).__name__}: {exception}"
        once(logging.WARNING, "pass %s failed, the region stays as it was without it (%s)", name, error)
        logger.debug("pass %s failed", name, exc_info=True)
        rewrite = Rewrite(declined=[Decline(name, f"the pass failed: {error}")])
    return PassRun(name, rewrite, (time.perf_counter() - start) * 1e3, error)


_MEMBERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "meta")


class _State:
    """The state of a module before a pass."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._text = str(module.graph)
        self._graph = copy.deepcopy(module.graph)  # has meta dicts of its own, which share the values
        self._members: dict[str, Any] = {kind: copy.copy(module.__dict__[kind]) for kind in _MEMBERS}
        self._attributes = {name: value for name, value in module.__dict__.items() if name not in self._members}

    def differs(self, module: fx.GraphModule) -> bool:
        return str(module.graph) != self._text

    def module(self, module: fx.GraphModule) -> fx.GraphModule:
        """Return a module of the graph as it was, with the parameters that a pass has left to `module`."""
        return fx.GraphModule(module, self._graph)

    def restore(self, module: fx.GraphModule) -> None:
        for name in set(module.__dict__) - set(self._attributes) - set(self._members):
            del module.__dict__[name]
        module.__dict__.update(self._attributes)
        for kind, members in self._members.items():
            module.__dict__[kind].clear()
            module.__dict__[kind].update(members)
        module.graph = self._graph  # recompiles


class _Dump:
    """The dump of graphs as numbered text files in a folder that only its owner may read: graphs tell about models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, module: fx.GraphModule, name: str, stage: str) -> None:
        """Write one file, whole or not at all. A disk that refuses it costs a warning, never the compilation."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # the process is part of the name: the ranks of one machine may share the folder
            path = self._folder / f"{self._next_number():04d}-{os.getpid()}-{name}-{stage}.py"
            text = module.print_readable(print_output=False)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", suffix=".tmp", delete=False) as file:
                file.write(text)
            os.replace(file.name, path)
        except OSError as error:
            once(logging.WARNING, "graphs are not dumped to %s: %s", self._folder, error)

    def _next_number(self) -> int:
        taken = (re.match(r"(\d{4,})-", entry.name) for entry in self._folder.iterdir())
        return 1 + max((int(match[1]) for match in taken if match), default=0)
