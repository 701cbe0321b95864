"""One compiled graph for each set of parameters, since a graph that reduces gradients is made for certain parameters.

Dynamo treats parameters as inputs like any other. Modules of one class share a graph: the blocks of a model that is
compiled block by block, for example, or two models. Their computations are the same, but their gradients are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.passes.graphs import copied

Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class GraphPerParameters:
    """A callable that uses `compiled` for the parameters it was compiled for, and compiles anew for others."""

    def __init__(
        self, compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any], lower: Lower
    ) -> None:
        """Note the parameters. module: an uncompiled copy of the graph. inputs: of `compiled`. lower: compiles it."""
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
            compiled = torch.compile(copied(self._module).forward, backend=self._lower, fullgraph=True)
            known = self._others[key] = ([weakref.ref(inputs[place]) for place in self._places], compiled)
        return known[1](*inputs)

    def _are(self, known: Sequence[weakref.ref[Any]], inputs: Sequence[Any]) -> bool:
        return all(each() is inputs[place] for each, place in zip(known, self._places, strict=True))
