"""Fusion of a linear layer with the cross-entropy that alone reads its output.

The fused operator never holds all logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from deepytorch.passes.base import Context, Decline, Pass, Rewrite, Role
from deepytorch.passes.graphs import arguments_of, is_packed, match_softcap
from deepytorch.passes.ops import linear_cross_entropy  # noqa: F401, registers the operator
from deepytorch.passes.ops.linear_cross_entropy_chunked import NONE
from deepytorch.passes.slicing import writes_in_place

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FLATTEN = aten.flatten.using_ints
_SAME = (aten.contiguous.default, aten.clone.default, aten.alias.default)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_LEAST_CLASSES = 1024  # below this the fixed cost of launching the operators of each piece outweighs the gain


class _Way(NamedTuple):
    """The nodes between a linear layer and its loss, both excluded, from the last to the first."""

    linear: fx.Node
    rows: tuple[fx.Node, ...]  # nodes that move or reshape rows: applied to the hidden states instead of the logits
    softcap: float
    upcast: bool


@dataclass(frozen=True)
class FuseLinearLoss(Pass):
    """Fuses `cross_entropy(linear(x))` where nothing else reads the logits.

    `least_bytes`: size of the first batch's logits in float32 from which the saved memory is worth a fusion. If the
    loss of each row is asked for, the backward computes the logits again, which is a third more work. None: only time
    counts, and only packed graphs are fused.

    `faster_bytes`: size from which the fusion also gains time, or at least loses none. The threshold holds for a
    float32 layer on a CPU with 1,024 classes or more whose losses are reduced to one number. Measured on two cores,
    forward and backward, relative to Inductor's time (rows x hidden size x classes): 32 x 512 x 8192: 0.94;
    128 x 256 x 2048: 0.83; 1366 x 256 x 2048: 0.93; 500 x 512 x 8192: 0.81; 1366 x 512 x 8192: 0.89;
    1366 x 512 x 32000: 0.97; 1000 x 768 x 50257: 1.02.
    """

    least_bytes: int | None = 1 << 30
    faster_bytes: int = 1 << 20

    def concerns(self, module: fx.GraphModule) -> bool:
        """Return whether the graph has a loss, a weight with enough rows, and a batch with enough places."""
        if self.least_bytes is None and not is_packed(module):
            return False
        rows, classes, fast = 0, 0, False
        for node in module.graph.nodes:
            value, given = node.meta.get("val"), node.meta.get("input")
            if node.op != "placeholder" or given is None or not isinstance(value, torch.Tensor):
                continue
            sizes = _sizes(value)
            if None in sizes:
                continue
            if given.role is Role.BATCH and value.dim() > 0:
                rows = max(rows, math.prod(sizes))
            elif given.role is Role.PARAMETER and value.dim() == 2:
                classes, fast = max(classes, sizes[0]), fast or _is_fast(value)
        has_loss = any(node.target is aten.cross_entropy_loss.default for node in module.graph.nodes)
        return has_loss and self._is_much(rows * classes, fast)

    def _is_much(self, places: int, fast: bool) -> bool:
        if fast and places * 4 >= self.faster_bytes:
            return True
        return self.least_bytes is not None and places * 4 >= self.least_bytes

    def is_large(self, logits: torch.Tensor, reduced: bool = True) -> bool:
        """Return whether logits, by the sizes of the first batch, are better not held at once.

        reduced: whether the losses become one number.
        """
        sizes = _sizes(logits)
        fast = reduced and _is_fast(logits) and sizes[-1] is not None and sizes[-1] >= _LEAST_CLASSES
        return None not in sizes and self._is_much(math.prod(sizes), fast)

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Replace each loss that allows it by one operator; `declined` says why the other losses do not."""
        rewrite = Rewrite()
        for node in list(module.graph.nodes):
            if node.target is not aten.cross_entropy_loss.default:
                continue
            given = arguments_of(node)
            if not self.is_large(_value(given["self"]), reduced=given["reduction"] != NONE):
                continue  # too small for a gain, so no decline is reported
            found = self._way(node)
            if isinstance(found, str):
                rewrite.declined.append(Decline(node.name, found))
                continue
            logits = _value(found.linear)  # their dtype may differ from the loss's input, by a cast between the two
            if not _is_fast(logits) and not self.is_large(_value(given["self"]), reduced=False):
                continue
            rewrite.changes.append(f"{node.name} and {found.linear.name} are one operator")
            _fuse(module.graph, node, found)
        return rewrite

    def _way(self, loss: fx.Node) -> _Way | str:
        """Return the nodes between the linear layer and the loss, or the reason why the logits must stay whole."""
        given = arguments_of(loss)
        logits, target = given["self"], given["target"]
        classes = _value(logits).shape[-1]
        if _value(logits).dim() != 2 or _value(target).dtype != torch.int64 or not isinstance(classes, int):
            return "the logits stay whole: the loss is not over rows of classes and their numbers"
        if given["label_smoothing"] and given["weight"] is not None:
            return "the logits stay whole: labels are smoothed and classes weighed"
        rows: list[fx.Node] = []
        softcap, node = 0.0, logits
        while node.target is not aten.linear.default:
            if len(node.users) != 1:
                return f"the logits stay whole: {node.name} is read elsewhere, too"
            if node.target in _CASTS and _casts_to_float(node):
                node = node.args[0]
            elif (capped := match_softcap(node)) is not None and _are_read_once(capped[2]) and not softcap:
                softcap, node, _ = capped
            elif _moves_rows(node, classes):
                rows.append(node)
                node = node.args[0]
            else:
                return f"the logits stay whole: {node.name} stands between them and the loss"
            if not isinstance(node, fx.Node):
                return "the logits stay whole: they are no output of a linear layer"
        if len(node.users) != 1:
            return f"the logits stay whole: {node.name} is read elsewhere, too"
        if any(writes_in_place(each) or "set_grad_enabled" in _name(each) for each in _between(node, loss)):
            return "the logits stay whole: something is written, or the grad mode changes, between them and the loss"
        if "recompute" in node.meta or "recompute" in loss.meta:
            return "the logits stay whole: they are to be computed again in the backward"
        # cast to float before the loss, or by autocast in it
        upcast = _value(node).dtype in (torch.bfloat16, torch.float16) and _value(loss).dtype == torch.float32
        return _Way(node, tuple(rows), softcap, upcast)


def _fuse(graph: fx.Graph, loss: fx.Node, way: _Way) -> None:
    given = arguments_of(loss)
    hidden, weight, *rest = way.linear.args
    bias = rest[0] if rest else way.linear.kwargs.get("bias")
    dtype = _value(way.linear).dtype
    size = _value(weight).shape[1]
    with graph.inserting_before(loss):
        hidden, weight, bias = (_cast(graph, each, dtype) for each in (hidden, weight, bias))
        for node in reversed(way.rows):
            if node.target in _RESHAPES:
                shape = [*node.args[1][:-1], size]
                hidden = graph.call_function(aten.reshape.default, (hidden, shape))
            elif node.target in (_FLATTEN, aten.slice.Tensor):
                hidden = graph.call_function(node.target, (hidden, *node.args[1:]), node.kwargs)
        hidden = graph.call_function(aten.reshape.default, (hidden, [-1, size]))
        fused = graph.call_function(
            torch.ops.deepytorch.linear_cross_entropy.default,
            (hidden, weight, bias, given["target"], given["weight"]),
            {
                "reduction": given["reduction"],
                "ignore_index": given["ignore_index"],
                "label_smoothing": given["label_smoothing"],
                "softcap": way.softcap,
                "upcast": way.upcast,
            },
        )
    loss.replace_all_uses_with(fused)
    fused.meta |= {name: kept for name, kept in loss.meta.items() if name in ("val", "stack_trace", "nn_module_stack")}
    unread: Any = loss
    while unread.op == "call_function" and not unread.users:
        before = unread.args[0]
        graph.erase_node(unread)
        unread = before


def _cast(graph: fx.Graph, node: Any, dtype: torch.dtype) -> Any:
    """Cast an operand of the linear layer to `dtype`, as autocast would."""
    if not isinstance(node, fx.Node) or _value(node).dtype == dtype:
        return node
    return graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes that run after `first` and before `last`."""
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _is_fast(value: torch.Tensor) -> bool:
    """Return whether the fused operator is faster than a layer and its loss for values of this device and dtype."""
    return value.device.type == "cpu" and value.dtype == torch.float32


def _sizes(value: torch.Tensor) -> list[Any]:
    """Return the sizes in the first batch, with None for each unknown size."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]


def _casts_to_float(node: fx.Node) -> bool:
    source = _value(node.args[0]).dtype
    if _value(node).device != _value(node.args[0]).device:
        return False
    return _value(node).dtype == torch.float32 and source in (torch.bfloat16, torch.float16, torch.float32)


def _moves_rows(node: fx.Node, classes: Any) -> bool:
    if node.target in (*_RESHAPES, _FLATTEN):
        return _value(node).shape[-1] == classes and _value(node.args[0]).shape[-1] == classes
    if node.target is aten.slice.Tensor:
        dim = node.args[1] if len(node.args) > 1 else 0
        return dim not in (-1, _value(node).dim() - 1)
    return node.target in _SAME


def _are_read_once(nodes: list[fx.Node]) -> bool:
    return all(len(node.users) == 1 for node in nodes)
