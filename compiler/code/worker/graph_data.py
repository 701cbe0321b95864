"""An FX graph as bytes, for another process. `pickle` alone cannot make them, because of operators and nodes.

The bytes go through a pipe to a process that this one has started. Nothing here reads from a disk.
"""

from __future__ import annotations

import importlib
import io
import pickle
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional

import deepytorch.passes.ops.linear_cross_entropy
import deepytorch.passes.ops.pack
import deepytorch.passes.ops.varlen_attention  # noqa: F401  (both register their operators)
from deepytorch.torch_internals import HigherOrderOperator, OpOverload

_KEPT = ("recompute", "ac_graph_id")  # of a node's meta: the tags of activation checkpointing


class CannotSend(Exception):
    """An error for a graph that holds something unknown to another process."""


class GraphData:
    """A module of Dynamo's or of a pass, without the values in its meta."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Read a module's graph. Raises `CannotSend` if it calls modules or holds anything but plain tensors."""
        self._nodes: list[tuple[str, str, Any, Any, Any, dict[str, Any]]] = []
        self._attributes: dict[str, Any] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                raise CannotSend(f"{node.name} calls a module")
            if node.op == "get_attr":
                value = getattr(module, str(node.target), None)
                if type(value) is not torch.Tensor:
                    raise CannotSend(f"{node.name} is a {type(value).__name__}")
                self._attributes[str(node.target)] = value
            args, kwargs = map_aggregate((node.args, node.kwargs), _by_name)
            tags = {name: node.meta[name] for name in _KEPT if name in node.meta}
            self._nodes.append((node.op, node.name, node.target, args, kwargs, tags))

    def constants(self) -> list[torch.Tensor]:
        """Return the tensors that are part of the graph."""
        return list(self._attributes.values())

    def module(self) -> fx.GraphModule:
        """Return a module with the graph: the same code, with the same names."""
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}
        for op, name, target, args, kwargs, tags in self._nodes:
            args, kwargs = map_aggregate((args, kwargs), lambda each: made[each.name] if type(each) is _Ref else each)
            node = made[name] = graph.create_node(op, target, args, kwargs, name)
            if node.name != name:
                raise CannotSend(f"{name} came out as {node.name}")
            node.meta.update(tags)
        root = torch.nn.Module()
        for name, value in self._attributes.items():
            setattr(root, name, value)
        return fx.GraphModule(root, graph)


class _Ref:
    """A reference to a node among the arguments of another one."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ref, (self.name,)

    def __repr__(self) -> str:
        return self.name


def _by_name(value: Any) -> Any:
    return _Ref(value.name) if isinstance(value, fx.Node) else value


def to_bytes(value: Any) -> bytes:
    """Pickle a value that may hold operators. Raises `CannotSend` for objects that only this process knows."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except CannotSend:
        raise
    except Exception as error:
        raise CannotSend(f"{type(error).__name__}: {str(error)[:200]}") from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            namespace, _, name = value.name().partition("::")
            if namespace not in ("aten", "prims", "deepytorch"):
                raise CannotSend(f"{value.name()} is an operator of the script's")
            return _operator, (namespace, name.partition(".")[0], value._overloadname)
        name = str(getattr(value, "__name__", ""))
        if isinstance(value, ModuleType):
            return importlib.import_module, (name,)
        if isinstance(value, HigherOrderOperator):
            raise CannotSend(f"{value.name()} holds graphs of its own")
        module = getattr(value, "__module__", None)
        if module == "__main__" and callable(value):
            raise CannotSend(f"{getattr(value, '__qualname__', value)} stands in the script")
        if isinstance(value, torch.device):
            return torch.device, (str(value),)
        if isinstance(value, FunctionType) and vars(functional).get(name) is value:
            return getattr, (functional, name)  # some, such as `max_pool2d`, are made inside of a function
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
