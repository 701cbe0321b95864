"""Detection of values that may be infinite or NaN at pads, although they are finite at tokens.

The model computes the values at pads from pad ids, and they are as finite as those of tokens. Exceptions are numbers
that the graph fills in (`masked_fill(mask, -inf)`), logarithms of values that may be zero, and divisions by values that
may be zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.passes.graphs import arguments_of
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import Attention

aten = torch.ops.aten

# Operator -> the argument that holds the number that is filled in.
_FILLS = {
    aten.masked_fill.Scalar: 2, aten.masked_fill_.Scalar: 2, aten.where.ScalarOther: 2, aten.where.ScalarSelf: 1,
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0,
    aten.fill.Scalar: 1, aten.fill_.Scalar: 1,
}  # fmt: skip
_LOGARITHMS = frozenset({aten.log.default, aten.log2.default, aten.log10.default, aten.reciprocal.default})
_DIVISIONS = frozenset({aten.div.Tensor, aten.div_.Tensor})
# A divisor that one of these operators returned was deliberately kept away from zero by the model's author.
_KEEP_FROM_ZERO = frozenset({
    aten.clamp.default, aten.clamp_min.default, aten.clamp_.default, aten.maximum.default, aten.add.Tensor,
    aten.add.Scalar, aten.add_.Tensor, aten.add_.Scalar, aten.exp.default, aten.sigmoid.default, aten.softplus.default,
})  # fmt: skip
_AS_FAR_FROM_ZERO = frozenset({
    aten.sqrt.default, aten.expand.default, aten.expand_as.default, aten.unsqueeze.default, aten.to.dtype,
    aten.sum.dim_IntList,
})  # fmt: skip


def may_be_infinite(graph: fx.Graph, slicer: Slicer, attentions: Sequence[Attention]) -> set[fx.Node]:
    """Return the values that may be infinite or NaN at pads, and all values computed from them.

    attentions: their masks may hold infinities, which do not make their outputs infinite.
    """
    found: set[fx.Node] = set()
    outputs = {each.output: [each.query, each.key, each.value] for each in attentions}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = outputs.get(node, node.all_input_nodes)
        if any(source in found for source in sources) or (node not in outputs and _makes_infinite(node, slicer)):
            found.add(node)
    return found


def _makes_infinite(node: fx.Node, slicer: Slicer) -> bool:
    target: Any = node.target
    if target in _FILLS:
        place = _FILLS[target]
        number = node.args[place] if len(node.args) > place else node.kwargs.get("fill_value", node.kwargs.get("value"))
        return isinstance(number, float) and not math.isfinite(number)
    if slicer.from_batch(node):  # masks and counts: the batch itself shows their values
        return False
    if target in _DIVISIONS:
        divisor = node.args[1]
        return isinstance(divisor, fx.Node) and not slicer.from_batch(divisor) and not _is_kept_from_zero(divisor)
    return target in _LOGARITHMS and not _is_kept_from_zero(node.args[0])


def _are_largest(value: fx.Node) -> bool:
    """Return whether a value holds the largest entries of another one, found by `topk`."""
    if value.target is not operator.getitem or value.args[1] != 0:
        return False
    found: Any = value.args[0]
    return found.target is aten.topk.default and arguments_of(found)["largest"]


def _is_kept_from_zero(value: Any) -> bool:
    largest = False
    while isinstance(value, fx.Node) and (value.target in _AS_FAR_FROM_ZERO or _are_largest(value)):
        largest = largest or _are_largest(value)
        value = value.args[0].args[0] if _are_largest(value) else value.args[0]
    if largest and isinstance(value, fx.Node) and value.target in (aten.softmax.int, aten._softmax.default):
        return True  # the largest of n probabilities is at least 1 / n
    return not isinstance(value, fx.Node) or value.op != "call_function" or value.target in _KEEP_FROM_ZERO
