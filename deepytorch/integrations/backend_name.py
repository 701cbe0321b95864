"""The backend's name for `torch.compile(model, backend="deepytorch")` from a source tree that is not installed.

An installed package has an entry point, by which torch finds the backend. A source tree on `PYTHONPATH` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import fx

_NAME, _GROUP = "deepytorch", "torch_dynamo_backends"


def register(registry: Any) -> None:
    """Add the backend's name to torch's registry of backends, a module, unless an entry point does so."""
    if not metadata.entry_points(group=_GROUP, name=_NAME):
        registry.register_backend(_backend, name=_NAME)


def _backend(module: fx.GraphModule, example_inputs: Any, **options: Any) -> Callable[..., Any]:
    from deepytorch.compiler.backend import deepytorch_backend

    return deepytorch_backend(module, example_inputs, **options)
