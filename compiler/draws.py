"""The random numbers that a graph of Dynamo's draws: by dropout alone, or by functions that the model calls by name."""

from __future__ import annotations

from typing import Any

from torch import fx

_NAMED = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_", "bernoulli",
    "bernoulli_", "multinomial", "poisson", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "rrelu", "rrelu_",
})  # fmt: skip


def draws_as_eager(module: fx.GraphModule) -> bool:
    """Return whether a graph draws numbers by name and has no dropout: its compiled code can draw what eager draws.

    With dropout this would cost what compiling gains, so that all its draws differ from eager's, as dropout's do.
    """
    calls = [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    return any(_name(node) in _NAMED for node in calls) and not any(_drops(node) for node in calls)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target) if node.op == "call_method" else getattr(target, "__name__", "")


def _drops(node: fx.Node) -> bool:
    """Return whether a call is a dropout that is on."""
    if node.op != "call_function" or "dropout" not in _name(node):
        return False
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return training is not False
