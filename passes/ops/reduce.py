"""`deepytorch::reduce_start` and `reduce_wait`: gradients leave a compiled backward while the rest of it runs.

`reduce_part` and `reduce_rows` start one gradient in two steps: first everything except rows of an embedding, then the
rows. The second step takes the result of the first, so that no compiler reorders the two. All operators look up at run
time what is to happen (`comm.gradients`), so that one compiled graph serves steps that reduce and steps that only
accumulate. `reduce_wait` returns memory of the reducer, never that of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepytorch.comm.gradients import registry
from deepytorch.passes.ops.library import register

_START = "reduce_start(Tensor[] gradients, int[] members, str name) -> Tensor"
_PART = "reduce_part(Tensor gradient, int member, str name) -> Tensor"
_ROWS = "reduce_rows(Tensor ids, Tensor values, Tensor? kept, Tensor? part, int member, str name) -> Tensor"
_WAIT = "reduce_wait(Tensor[] started, int[] members, str name) -> Tensor[]"

# These operators decide at run time if they reduce, so a CUDA graph must not record them.
_STATEFUL = (torch.Tag.cudagraph_unsafe,)


def _start(gradients: Sequence[Tensor], members: Sequence[int], name: str) -> Tensor:
    registry.find(name).arrive(members, gradients)
    return gradients[0].new_empty(0)


def _start_fake(gradients: Sequence[Tensor], members: Sequence[int], name: str) -> Tensor:
    return gradients[0].new_empty(0)


def _part(gradient: Tensor, member: int, name: str) -> Tensor:
    registry.find(name).arrive_part(member, gradient)
    return gradient.new_empty(0)


def _part_fake(gradient: Tensor, member: int, name: str) -> Tensor:
    return gradient.new_empty(0)


def _rows(ids: Tensor, values: Tensor, kept: Tensor | None, part: Tensor | None, member: int, name: str) -> Tensor:
    registry.find(name).arrive_rows(member, ids, values, kept)
    return values.new_empty(0)


def _rows_fake(ids: Tensor, values: Tensor, kept: Tensor | None, part: Tensor | None, member: int, name: str) -> Tensor:
    return values.new_empty(0)


def _wait(started: Sequence[Tensor], members: Sequence[int], name: str) -> list[Tensor]:
    return registry.find(name).wait(members)


def _wait_fake(started: Sequence[Tensor], members: Sequence[int], name: str) -> list[Tensor]:
    expected = EXPECTED.get(name)
    layouts = registry.find(name).layouts(members) if expected is None else [expected[member] for member in members]
    return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in layouts]


# Gradients of future reducers, for graphs that are compiled earlier: shape, stride, type and device of each.
EXPECTED: dict[str, Mapping[int, tuple[Any, Any, torch.dtype, torch.device]]] = {}


register(_START, {"CompositeExplicitAutograd": _start}, _start_fake, tags=_STATEFUL)
register(_PART, {"CompositeExplicitAutograd": _part}, _part_fake, tags=_STATEFUL)
register(_ROWS, {"CompositeExplicitAutograd": _rows}, _rows_fake, tags=_STATEFUL)
register(_WAIT, {"CompositeExplicitAutograd": _wait}, _wait_fake, tags=_STATEFUL)
