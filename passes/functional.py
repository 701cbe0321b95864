"""Writes in place into values of a graph, rewritten as operators that return a new value.

Models write in place to save memory (`weights /= weights.sum(-1, keepdim=True)`, `mask.scatter_(1, index, 1)`). The
analyses follow values, not memory, so a write is replaced by the operator of the same name without the underscore, and
later uses of the written value by its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from deepytorch.passes.graphs import arguments_of, copied
from deepytorch.passes.slicing import storage_roots, writes_in_place

aten = torch.ops.aten

# Under autocast too, their results are those of the functional operators, if all operands have the written dtype.
_ARITHMETIC = {
    "add": ("Tensor", "Scalar"), "sub": ("Tensor", "Scalar"), "mul": ("Tensor", "Scalar"), "div": ("Tensor", "Scalar"),
    "clamp": ("default", "Tensor"), "clamp_min": ("default", "Tensor"), "clamp_max": ("default", "Tensor"),
    "relu": ("default",), "logical_and": ("default",), "logical_or": ("default",), "logical_not": ("default",),
    "bitwise_and": ("Tensor", "Scalar"), "bitwise_or": ("Tensor", "Scalar"), "bitwise_not": ("default",),
}  # fmt: skip
# Their results have the written dtype, whatever the other operands are.
_MOVES = {
    "masked_fill": ("Scalar", "Tensor"), "index_put": ("default",), "index_add": ("default",),
    "index_fill": ("int_Scalar", "int_Tensor"), "scatter": ("src", "value"), "scatter_add": ("default",),
}  # fmt: skip


def _functional(names: dict[str, tuple[str, ...]]) -> dict[Any, Any]:
    return {
        getattr(getattr(aten, f"{name}_"), overload): getattr(getattr(aten, name), overload)
        for name, overloads in names.items()
        for overload in overloads
    }


_OF_ONE_DTYPE = _functional(_ARITHMETIC)
_FUNCTIONAL = {**_OF_ONE_DTYPE, **_functional(_MOVES), aten.copy_.default: aten._to_copy.default}


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module with its in-place writes replaced where that is proved to be the same, or the module itself.

    Replaced are the writes into a value that an operator of this graph returned, made through the value itself (not
    through a view), with gradients on, and where no view of it is used on both sides of a write.
    """
    if not _replaceable(module.graph) and not _all_filled_in_parts(module.graph):
        return module
    module = copied(module)
    for empty, parts in _all_filled_in_parts(module.graph).items():
        _concatenate(empty, parts)
    writes = _replaceable(module.graph)
    current: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        node.args = fx.map_arg(node.args, lambda source: current.get(source, source))
        node.kwargs = fx.map_arg(node.kwargs, lambda source: current.get(source, source))
        if node not in writes:
            continue
        written = node.args[0]
        with module.graph.inserting_before(node):
            if node.target is aten.copy_.default:
                dtype = node.meta["val"].dtype  # a cast that always copies, as its argument may be written into later
                made = module.graph.call_function(aten._to_copy.default, (node.args[1],), {"dtype": dtype})
            else:
                made = module.graph.call_function(_FUNCTIONAL[node.target], node.args, dict(node.kwargs))
        made.meta = dict(node.meta)
        for old in [*(old for old, new in current.items() if new is written), written, node]:
            current[old] = made
    for node in reversed(list(writes)):
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return module


_EMPTY = frozenset({aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default})


def _all_filled_in_parts(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the empty tensors that are filled part by part with gradients on, each with the writes that fill it."""
    found = {node: parts for node in graph.nodes if (parts := _filled_in_parts(node))}
    if not found:
        return found
    roots, grad_off = storage_roots(graph), _without_gradient(graph)
    writes = [node for node in graph.nodes if writes_in_place(node) and isinstance(node.args[0], fx.Node)]

    def is_the_same(parts: list[fx.Node]) -> bool:
        """Return whether all parts may be read where the last one is written."""
        last = max(parts)
        changed = any(
            roots[write.args[0]] is roots[part.args[1]] and part < write < last for part in parts for write in writes
        )
        return not changed and not grad_off.intersection(parts)

    return {empty: parts for empty, parts in found.items() if is_the_same(parts)}


def _filled_in_parts(empty: fx.Node) -> list[fx.Node]:
    """Return the writes that fill an empty tensor part by part along one dimension, in the order of the parts.

    The list is empty if that is not all that is written into it, or if anything reads it before. `x[..., :n] = a;
    x[..., n:] = b` is a concatenation that needs no copy of its own.
    """
    if empty.target not in _EMPTY:
        return []
    parts: dict[int, fx.Node] = {}
    ends: dict[int, int] = {}
    dims = set()
    users = list(empty.users)
    last = None
    while users and users[0].target is aten.slice.Tensor and len(users[0].users) == 1:
        part = users.pop(0)
        write, given = next(iter(part.users)), arguments_of(part)
        start = given["start"] or 0
        if write.target is not aten.copy_.default or write.args[0] is not part or write.users or given["step"] != 1:
            return []
        if not isinstance(start, int) or not isinstance(given["end"], (int, type(None))) or start in parts:
            return []
        source = write.args[1]
        if not isinstance(source, fx.Node) or not _is_alike(source.meta["val"], part.meta["val"]):
            return []
        parts[start], last = write, write
        ends[start] = start + part.meta["val"].shape[given["dim"]]
        dims.add(given["dim"] % empty.meta["val"].dim())
    if len(dims) != 1 or last is None or any(user < last for user in users):
        return []
    reached: Any = 0
    for start in sorted(parts):
        if start != reached:
            return []
        reached = ends[start]
    whole = empty.meta["val"].shape[dims.pop()]
    return [parts[start] for start in sorted(parts)] if isinstance(whole, int) and reached == whole else []


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two values have one dtype and, symbol by symbol, one shape."""
    return one.dtype is other.dtype and list(map(str, one.shape)) == list(map(str, other.shape))


def _concatenate(empty: fx.Node, writes: list[fx.Node]) -> None:
    graph, last = empty.graph, max(writes)
    dim = arguments_of(writes[0].args[0])["dim"]  # type: ignore[arg-type]
    with graph.inserting_after(last):
        made = graph.call_function(aten.cat.default, ([write.args[1] for write in writes], dim))
    made.meta = {**last.meta, "val": empty.meta["val"]}
    parts = [write.args[0] for write in writes]
    for node in (*writes, *parts):
        graph.erase_node(node)  # type: ignore[arg-type]
    empty.replace_all_uses_with(made)
    graph.erase_node(empty)


def _replaceable(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the writes that can be replaced, in order, each with the value that it writes into."""
    roots = storage_roots(graph)
    aliases: dict[fx.Node, list[fx.Node]] = {}
    for node, root in roots.items():
        if node is not root:
            aliases.setdefault(root, []).append(node)
    place = {node: index for index, node in enumerate(graph.nodes)}
    grad_off = _without_gradient(graph)
    found: dict[fx.Node, fx.Node] = {}
    for root, members in aliases.items():
        writes = [node for node in members if writes_in_place(node)]
        if not writes or root.op != "call_function" or writes_in_place(root):
            continue
        known = {root, *writes}
        direct = all(
            node.target in _FUNCTIONAL and node.args[0] in known and node not in grad_off and _keeps_form(node)
            for node in writes
        )
        views = [node for node in members if node not in known]
        if direct and not any(_is_used_across(view, writes, place) for view in views):
            found.update((node, root) for node in writes)
    return dict(sorted(found.items(), key=lambda pair: place[pair[0]]))


def _keeps_form(write: fx.Node) -> bool:
    """Return whether the functional operator's result has the written value's dtype, and for a copy its shape."""
    if write.target is aten.copy_.default:
        source = write.args[1]
        return isinstance(source, fx.Node) and _shape(source) == _shape(write)
    if "logical" in write.target._schema.name and write.meta["val"].dtype is not torch.bool:  # type: ignore[union-attr]
        return False
    dtypes = {source.meta["val"].dtype for source in write.all_input_nodes if _is_tensor(source)}
    return write.target not in _OF_ONE_DTYPE or dtypes == {write.meta["val"].dtype}


def _shape(node: fx.Node) -> list[str]:
    return list(map(str, node.meta["val"].shape))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_used_across(view: fx.Node, writes: list[fx.Node], place: dict[fx.Node, int]) -> bool:
    """Return whether a write stands between the making of a view and a use of it."""
    last = max((place[user] for user in view.users), default=place[view])
    return any(place[view] < place[write] <= last for write in writes)


def _without_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes before which the graph itself has switched gradients off."""
    found: set[fx.Node] = set()
    off: Any = False
    for node in graph.nodes:
        if "set_grad_enabled" in getattr(node.target, "__name__", ""):
            off = not node.args[0]
        elif off:
            found.add(node)
    return found
