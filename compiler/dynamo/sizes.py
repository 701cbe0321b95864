"""Symbolic sizes from the first compile on: rows and positions of the batch are marked, and Dynamo traces once more.

Left alone, Dynamo bakes the first batch's sizes into the graph, frees one dimension at the second compile and another
at the third. Here the first trace is given back before anything is lowered: the batch's dimensions are marked on the
example tensors, and Dynamo starts over. The marks are taken off again before guards are made, so that neither the
user's tensors nor later calls are touched. A region that then has nothing to pack is traced a last time as stock would
have traced it, so that a declined region costs tracing time and nothing else.

[Note: Restarts]
A backend cannot ask Dynamo for another trace. It can raise an exception that Dynamo takes for its own: `RestartTrace`.
Dynamo drops the graph and traces the frame once more, with the same arguments; nothing was compiled, nothing has run.
Information for the next trace travels as attributes of the batch's tensors, which are taken off when they are read.

    1st trace   sizes are fixed: mark the batch's dimensions, raise (`which_trace`; again if inputs come late)
    2nd trace   sizes are symbols: analyse; if nothing can be packed, leave the reasons, raise (`restart_as_stock`)
    3rd trace   the reasons are there: stock compiles the graph as without us (`Trace.DECLINED`)

If we make the call ourselves, the model has modules that attend by their names, and it is not packed at model entry,
then its batch is marked before the first trace, which so is the second one already (`marked_ahead`). A graph that has
nothing to pack after all is traced as it comes, once (`trace_as_it_comes`): marks that were made ahead are gone by
then, so that no graph asks for a restart twice.

So restarts end. `RestartTrace` inherits from two exceptions of torch. Dynamo lets `TensorifyScalarRestartAnalysis` out
of a backend as it is, and not as the backend's failure. `UnspecializeRestartAnalysis` makes Dynamo forget the way of
the trace before, which a trace with symbols does not take. Stock's own lowering raises the first kind too. Therefore
code that catches `Exception` around such calls lets `TensorifyScalarRestartAnalysis` pass first. To suppress errors
(`compile_module`) does not stop a restart: Dynamo catches the restart before it looks at that setting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import fx, nn

from deepytorch.compiler.dynamo.attends_by_name import attends_by_name
from deepytorch.compiler.dynamo.capture import is_batch_input
from deepytorch.torch_internals import (
    TensorifyScalarRestartAnalysis,
    UnspecializeRestartAnalysis,
    dynamo_config,
    maybe_mark_dynamic,
    tree_flatten,
)

_MARK, _MARKED = "_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"
_OURS, _DECLINED = "_deepytorch_marked", "_deepytorch_declined"


class RestartTrace(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """The exception that makes Dynamo start over: see [Note: Restarts]."""


class Trace(Enum):
    """The number of a trace among those of its region: see [Note: Restarts]."""

    AS_IT_COMES = "as it comes"  # nothing to mark: sizes are symbolic already, or must not become so
    MARKED = "marked"  # the second, with symbolic sizes
    DECLINED = "declined"  # the last, after there was nothing to pack


def which_trace(module: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Trace, list[str]]:
    """Return the kind of this trace, and after a decline its reasons. Takes our marks off the user's tensors.

    If sizes are still fixed, this raises `RestartTrace`, so that Dynamo starts over: see [Note: Restarts].
    """
    batch = _batch(module, example_inputs)
    reasons = next((getattr(tensor, _DECLINED) for tensor, _ in batch if hasattr(tensor, _DECLINED)), None)
    if reasons is not None:
        for tensor, _ in batch:
            tensor.__dict__.pop(_DECLINED, None)
        return Trace.DECLINED, reasons
    begun = any(hasattr(tensor, _OURS) for tensor, _ in batch)
    if not begun and _sizes_are_fixed():
        return Trace.AS_IT_COMES, []
    # A trace that was cut short did not see every input: new inputs of this trace are marked in turn.
    fixed = [(tensor, _unmarked_dims(fake)) for tensor, fake in batch if not hasattr(tensor, _OURS)]
    if any(dims for _, dims in fixed):
        for tensor, dims in fixed:
            if dims:
                setattr(tensor, _OURS, dims)
                maybe_mark_dynamic(tensor, list(dims))
        raise RestartTrace  # see [Note: Restarts]
    for tensor, _ in batch:
        _unmark(tensor)
    return (Trace.MARKED if begun else Trace.AS_IT_COMES), []


def restart_as_stock(module: fx.GraphModule, example_inputs: Sequence[Any], reasons: list[str]) -> NoReturn:
    """Have Dynamo trace as if deepytorch were not there, after marks led to nothing. That trace gets `reasons`."""
    _drop_marks_ahead()
    for tensor, _ in _batch(module, example_inputs):
        setattr(tensor, _DECLINED, reasons)
    raise RestartTrace  # see [Note: Restarts]


@contextlib.contextmanager
def marked_ahead(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Mark the batch of a module's first call before Dynamo looks at it; the marks are gone after the block.

    Nothing is marked for modules that do not attend by their names, for batches of one row, and inside of `unmarked`;
    tensors that the user has marked are left alone.
    """
    if _UNMARKED.get() or _sizes_are_fixed() or not attends_by_name(module):
        yield
        return
    tensors = _tensors_in(args, kwargs)
    ahead: list[torch.Tensor] = []
    for tensor in tensors if _has_rows(tensors) else ():
        dims = {dim for dim, size in enumerate(tensor.shape) if size > 1}
        if dims and not is_marked(tensor):
            setattr(tensor, _OURS, dims)
            maybe_mark_dynamic(tensor, list(dims))
            ahead.append(tensor)
    token = _AHEAD.set(ahead)
    try:
        yield
    finally:
        _drop_marks_ahead()
        _AHEAD.reset(token)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Mark no batch ahead inside of the block: the caller packs it, so that one trace with its own sizes is enough."""
    token = _UNMARKED.set(True)
    try:
        yield
    finally:
        _UNMARKED.reset(token)


def trace_as_it_comes(example_inputs: Sequence[Any]) -> None:
    """Take our marks off the inputs of a graph that has nothing to pack.

    If marks were made ahead, this raises `RestartTrace`, so that Dynamo starts over: see [Note: Restarts].
    """
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    ahead = {id(tensor) for tensor in _AHEAD.get([])}
    restarts = any(id(tensor) in ahead and hasattr(tensor, _OURS) for tensor in tensors)
    _drop_marks_ahead()
    for tensor in tensors:
        _unmark(tensor)
        tensor.__dict__.pop(_DECLINED, None)
    if restarts:
        raise RestartTrace


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether Dynamo finds marks on a tensor: the user's, or those of another compiled graph that had it."""
    attributes = vars(tensor)
    return bool(attributes) and any(name.startswith("_dynamo_") for name in attributes)


def mark_alias(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return an alias of `tensor` with these dimensions marked; the user's tensor stays unmarked.

    The alias is a view only if gradients need one. For a view whose base was marked, Dynamo guards the base's sizes as
    well, and a later call with a tensor that has no base would be compiled once more.
    """
    alias = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
    maybe_mark_dynamic(alias, list(dims))
    return alias


def symbolic_dims(fake: Any) -> tuple[int, ...]:
    """Return the dimensions of a fake tensor whose sizes are symbols."""
    if not isinstance(fake, torch.Tensor):
        return ()
    return tuple(dim for dim, size in enumerate(fake.shape) if isinstance(size, torch.SymInt))


def varying_dims(fake: Any) -> tuple[int, ...]:
    """Return the symbolic dimensions of a fake tensor, without symbols that tracing has found to be one number."""
    return tuple(dim for dim in symbolic_dims(fake) if not fake.shape[dim].node.expr.is_number)


def _batch(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batch's tensors: (real, fake)."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        (value, node.meta["example_value"])
        for node, value in zip(placeholders, example_inputs, strict=True)
        if is_batch_input(node, value) and value.dim() >= 1
    ]


def _unmarked_dims(fake: torch.Tensor) -> set[int]:
    """Return the dimensions that need a mark: fixed ones, and under `dynamic=True` all.

    Under `dynamic=True` sizes that are equal by chance share a symbol (a source and a target of one length); a mark
    gives each its own.
    """
    shared = not dynamo_config.assume_static_by_default
    return {
        dim
        for dim, size in enumerate(fake.shape)
        if not (isinstance(size, int) and size <= 1) and (shared or isinstance(size, int))
    }


_AHEAD: ContextVar[list[torch.Tensor]] = ContextVar("deepytorch_marked_ahead")
_UNMARKED: ContextVar[bool] = ContextVar("deepytorch_unmarked", default=False)


def _drop_marks_ahead() -> None:
    ahead = _AHEAD.get([])
    for tensor in ahead:
        _unmark(tensor)
    ahead.clear()


def _sizes_are_fixed() -> bool:
    """Return whether the user asked for fixed sizes: `dynamic=False`."""
    return not dynamo_config.automatic_dynamic_shapes and bool(dynamo_config.assume_static_by_default)


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments that may be marked; none if a container cannot be flattened.

    The code of a registered class runs here, which may raise, and a container may hold itself.
    """
    try:
        return [each for each in tree_flatten((args, kwargs))[0] if _has_plain_sizes(each)]
    except Exception:
        return []


def _has_plain_sizes(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested and value.dim() >= 1


def _has_rows(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dim() >= 2 and tensor.shape[0] > 1 for tensor in tensors)


def _unmark(tensor: torch.Tensor) -> None:
    ours = getattr(tensor, _OURS, None)
    if ours is None:
        return
    marks: set[int] = getattr(tensor, _MARK, set())
    marks -= ours
    if not marks:
        for name in (_MARK, _MARKED):
            if hasattr(tensor, name):
                delattr(tensor, name)
    delattr(tensor, _OURS)
