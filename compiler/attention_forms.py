"""The form of `varlen_attention` that computes each attention of a packed graph, found before the graph runs."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, fx

from deepytorch.passes.ops.attention_tile import Call, Rule
from deepytorch.passes.ops.varlen_attention_cuda import choose_form
from deepytorch.torch_internals import FakeTensorMode


def attention_forms(graph: fx.Graph) -> dict[str, int]:
    """Return the number of attentions that each form computes, by the form's name and the reasons against the others.

    A key is, for example, "triton (flash: dtype torch.float32; efficient: slower where it was measured)". graph: every
    node has its value. The form is chosen by the traced shapes; each call chooses again, by its own arguments.
    """
    found: Counter[str] = Counter()
    for node in graph.find_nodes(op="call_function", target=torch.ops.deepytorch.varlen_attention.default):
        with FakeTensorMode():  # nothing is computed, and no size is guarded on
            found[_form(node)] += 1
    return dict(found)


def _form(node: fx.Node) -> str:
    query, key, value, cu_q, cu_k, _, _, bias = cast(Any, node.args[:8])
    query, key, value = _of_that_shape(query), _of_that_shape(key), _of_that_shape(value)
    if query.device.type != "cuda":
        return query.device.type
    rows_q = torch.empty(1)
    rows_k = rows_q if cu_k is cu_q else torch.empty(1)
    some_bias = None if bias is None else _of_that_shape(bias)
    # 1 and 1 stand for the longest rows: the choice only asks if there are tokens.
    call = Call(rows_q, rows_k, 1, 1, some_bias, None, None, None, Rule(**node.kwargs))  # type: ignore[arg-type]
    form, reasons = choose_form(query, key, value, call)
    return f"{form} ({'; '.join(reasons)})" if reasons else form


def _of_that_shape(node: Any) -> Tensor:
    """Return a tensor of the traced shape, with the values that its symbols had in the trace."""
    traced: Tensor = node.meta["val"]
    sizes, strides = (
        [(each.node.hint or 1) if isinstance(each, torch.SymInt) else each for each in given]
        for given in (traced.shape, traced.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=traced.dtype, device=traced.device)
