"""One compiled graph for each set of parameters: a graph that reduces gradients knows whose they are.

Dynamo takes parameters for inputs like any other. Modules of one class share a graph, such as the blocks of a model
that is compiled block by block, or two models. What is the same computation is not the same gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class GraphPerParameters:
    """Calls `compiled` with the parameters that it was compiled for; for others it compiles the graph anew."""

    def __init__(
        self, compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any], lower: Lower
    ) -> None:
        """module: a copy of the graph, not compiled yet. inputs: those of `compiled`. lower: compiles the graph."""
        self._places = [place for place, each in enumerate(inputs) if isinstance(each, torch.nn.Parameter)]
        self._own = [weakref.ref(inputs[place]) for place in self._places]
        self._compiled, self._module, self._lower = compiled, module, lower
        self._others: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], Callable[..., Any]]] = {}

    def __call__(self, *inputs: Any) -> Any:
        if self._are(self._own, inputs):
            return self._compiled(*inputs)
        key = tuple(id(inputs[place]) for place in self._places)
        known = self._others.get(key)
        if known is None or not self._are(known[0], inputs):
            graph = fx.Graph()
            graph.output(graph.graph_copy(self._module.graph, {}))
            module = fx.GraphModule(self._module, graph)
            compiled = torch.compile(module.forward, backend=self._lower, fullgraph=True)
            known = self._others[key] = ([weakref.ref(inputs[place]) for place in self._places], compiled)
        return known[1](*inputs)

    def _are(self, known: Sequence[weakref.ref[Any]], inputs: Sequence[Any]) -> bool:
        return all(each() is inputs[place] for each, place in zip(known, self._places, strict=True))
