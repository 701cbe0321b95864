"""Parts of Dynamo's graphs under `torch.vmap`, written as plain ATen for whole batches.

Libraries write a mask as a function of one row, head, query and key, and map it over all four (transformers, for masks
that are more than causal). In Dynamo's graph the map stands as calls that open a level, wrap tensors and close it; a
trace would lose them. Such a part is traced by itself here, through the maps, and its operators take its place.

Floating-point numbers may have gradients, which this trace would lose: a part with any stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from deepytorch.log import logger
from deepytorch.torch_internals import FakeTensorMode

_MODULE = "torch._functorch.predispatch"
_OPEN, _CLOSE = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_SET_UP = "lazy_load_decompositions"  # changes no number: the map's first call in a process reads operators' rules


def without_vmaps(module: fx.GraphModule, fake_mode: FakeTensorMode) -> fx.GraphModule:
    """Return a copy of Dynamo's graph `module` with its maps resolved; `module` itself if nothing can be resolved."""
    operators = {part: _operators(module, part, fake_mode) for part in _parts(module.graph) if not _has_floats(part)}
    resolved = {part[0]: (part, found) for part, found in operators.items() if found is not None}
    if not resolved:
        return module
    done = {node for part, _ in resolved.values() for node in part}
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        if node in resolved:
            part, found = resolved[node]
            read = [copies[each] for each in _read(part)]
            given: Any = graph.graph_copy(found, dict(zip(found.find_nodes(op="placeholder"), read, strict=True)))
            copies.update(zip(_given(part), given, strict=True))
        elif node not in done and _called(node) != _SET_UP:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return fx.GraphModule(module, graph)


def _called(node: fx.Node) -> str:
    """Return the name of a call that belongs to a map, "" for any other node."""
    return node.target.__name__ if getattr(node.target, "__module__", None) == _MODULE else ""


def _parts(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """Return the nodes of each outermost map, from the call that opens its level to that which closes it."""
    parts, depth = list[list[fx.Node]](), 0
    for node in graph.nodes:
        if _called(node) == _OPEN:
            if depth == 0:
                parts.append([])
            depth += 1
        if depth:
            parts[-1].append(node)
        if _called(node) == _CLOSE:
            depth -= 1
    return [tuple(part) for part in parts]


def _has_floats(part: Sequence[fx.Node]) -> bool:
    values = [node.meta.get("example_value") for node in (*part, *_read(part))]
    return any(
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) for value in values
    )


def _read(part: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes outside of a part that it reads, each once."""
    inside = set(part)
    return list(dict.fromkeys(each for node in part for each in node.all_input_nodes if each not in inside))


def _given(part: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a part that are read outside of it."""
    inside = set(part)
    return [node for node in part if any(user not in inside for user in node.users)]


def _operators(module: fx.GraphModule, part: Sequence[fx.Node], fake_mode: FakeTensorMode) -> fx.Graph | None:
    """Return a graph from what a part reads to the list of what it gives; None if it cannot be traced by itself."""
    alone, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _read(part):
        copies[node] = alone.placeholder(node.name)
    for node in part:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output([copies[node] for node in _given(part)])
    mapped = _Mapped(fx.GraphModule(module, alone))
    examples = [node.meta.get("example_value") for node in _read(part)]
    if any(example is None for example in examples):
        return None
    try:
        with fake_mode:
            traced = make_fx(lambda *values: mapped.run(*values), tracing_mode="real")(*examples)
    except Exception as error:
        mapped.close_levels()
        logger.debug("A part under torch.vmap cannot be traced by itself: %s", error)
        return None
    has_constants = any(node.op == "get_attr" for node in traced.graph.nodes)
    return None if has_constants else traced.graph


class _Mapped(fx.Interpreter):
    """The interpreter of a part, which knows what closes the levels that it has opened: an error would leave them."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        closing = [node.target for node in module.graph.nodes if _called(node) == _CLOSE]
        self._close: Any = closing[0]
        self._open = 0

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        self._open += (_called(n) == _OPEN) - (_called(n) == _CLOSE)
        return value

    def close_levels(self) -> None:
        """Close the levels that are open."""
        while self._open:
            self._close()
            self._open -= 1
