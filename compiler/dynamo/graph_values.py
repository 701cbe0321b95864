"""The values of a rewritten graph's nodes: fake tensors, from which the next pass reads sizes and dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.dynamo.capture import autocast_unrecorded
from deepytorch.torch_internals import detect_fake_mode, enter_autocast, exit_autocast


def give_values(module: fx.GraphModule) -> None:
    """Set `meta["val"]` of every node by running the graph on the fake values of its placeholders.

    If placeholders have none (in a graph that was not traced from fake tensors), nothing is done. Guards are not added:
    a value only describes the results for the sizes that the graph was traced for.
    """
    placeholders = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(placeholders)
    if mode is None:
        return
    allowed, grad = mode.allow_non_fake_inputs, torch.is_grad_enabled()
    mode.allow_non_fake_inputs = True
    try:
        with contextlib.ExitStack() as casts:
            casts.enter_context(mode)
            if mode.shape_env is not None:
                casts.enter_context(mode.shape_env.suppress_guards())
            _Valuing(module, casts).run(*placeholders)
    finally:
        mode.allow_non_fake_inputs = allowed
        torch.set_grad_enabled(grad)


class _Valuing(fx.Interpreter):
    """The interpreter that keeps each node's value. Autocast that the graph enters ends with `casts` at the latest."""

    def __init__(self, module: fx.GraphModule, casts: contextlib.ExitStack) -> None:
        super().__init__(module)
        self._casts = casts
        self._entered: list[contextlib.ExitStack] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output" and value is not None:
            n.meta["val"] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        if target is enter_autocast:
            device, dtype, enabled, _ = args
            self._entered.append(self._casts.enter_context(contextlib.ExitStack()))
            self._entered[-1].enter_context(autocast_unrecorded(device, dtype, enabled))
            return None
        if target is exit_autocast:
            return self._entered.pop().close()
        return super().call_function(target, args, kwargs)
