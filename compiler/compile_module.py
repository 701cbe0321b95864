"""The call of a module, compiled: inside of its own hooks, and once for all modules of its class.

Where Dynamo itself fails the frame runs in eager.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.beside.queue import expect, graphs_of
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamic_sizes import marked_ahead
from deepytorch.compiler.dynamo_settings import prepare_dynamo
from deepytorch.log import logger, once
from deepytorch.patches import patch
from deepytorch.torch_internals import dynamo_config


def compiled_call(kind: type, mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:
    """The call of modules of one class: compiled whole, or, where the module itself has hooks, inside of them.

    Hooks on the outermost module belong to whoever runs the loop (DeepSpeed counts steps in one); Dynamo would compile
    them, and compile anew when what they count changes.
    """
    whole, inner = (
        torch.compile(_own_code(function, kind), backend="deepytorch", mode=mode, options=options)
        for function in (step, _inner_step)
    )
    config = CompilerConfig.parse(mode, options)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _forgiving(), graphs_of(kind.__name__), _first_call(module, args, kwargs, config):
            forward = module.forward
            busy = isinstance(forward, partial) and forward.func is inner  # in another thread, or above on the stack
            if busy or not (module._forward_pre_hooks or module._forward_hooks or module._backward_hooks):
                return whole(module, *args, **kwargs)
            with _set_forward(module, partial(inner, forward)):
                return module._call_impl(*args, **kwargs)

    return call


def step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled. (`Module.compile` gives Dynamo `_call_impl`, which it leaves alone for torch's own modules.)"""
    return module._call_impl(*args, **kwargs)


def _inner_step(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a module with hooks."""
    return forward(*args, **kwargs)


@contextlib.contextmanager
def _first_call(module: nn.Module, args: Any, kwargs: Any, config: CompilerConfig) -> Iterator[None]:
    """Around a call: where it is the first of its class, one trace will do for it, see `marked_ahead`, and the process
    that compiles starts beside. Marks on the arguments of a later call would have Dynamo compile anew.
    """
    kind = type(module)
    if kind in _CALLED:
        yield
        return
    _CALLED.add(kind)
    prepare_dynamo()
    if not config.waits and all(each.device.type == "cpu" for each in module.parameters()):
        expect(kind.__name__)
    with marked_ahead(module, args, kwargs) if config.unpad else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _forgiving() -> Iterator[None]:
    """Nobody asked for a compiler: where Dynamo itself fails, the frame runs in eager, and it says so."""
    _quieten_dynamo()
    token = _FORGIVING.set(True)
    try:
        with dynamo_config.patch(suppress_errors=True):  # restarts pass: see [Note: Restarts]
            yield
    finally:
        _FORGIVING.reset(token)


_FORGIVING: ContextVar[bool] = ContextVar("deepytorch_forgiving", default=False)


@functools.cache
def _quieten_dynamo() -> None:
    """Dynamo logs a traceback for each frame that it leaves to eager, an error of the script's own among them, which is
    raised there anyway: it becomes a line of ours.
    """

    def keep(record: logging.LogRecord) -> bool:
        if not _FORGIVING.get() or record.levelno > logging.WARNING:
            return True
        text = record.getMessage()
        if "Traceback" not in text and "WON'T CONVERT" not in text and "graph break" not in text.lower():
            return True
        logger.debug("Dynamo: %s", text)
        once(logging.INFO, "Dynamo could not follow a part of the model, which runs in eager (details at level debug)")
        return False

    dynamo = logging.getLogger("torch._dynamo.convert_frame")
    patch(
        "logging.getLogger('torch._dynamo.convert_frame').filters",
        "say in a line what Dynamo could not follow",
        lambda: dynamo.addFilter(keep),
        lambda: dynamo.removeFilter(keep),
    )


@contextlib.contextmanager
def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module` has this forward, unless somebody gives it another one."""
    instance = vars(module)
    set_on_it = instance.get("forward")  # accelerate sets one, for mixed precision
    instance["forward"] = forward
    try:
        yield
    finally:
        if instance.get("forward") is forward:
            del instance["forward"]
            if set_on_it is not None:
                instance["forward"] = set_on_it


def _own_code(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """The function with a code object of its own for modules of this class: Dynamo keeps graphs by code object."""
    key = (function, kind)
    if key not in _STEPS:
        code = function.__code__.replace(co_name=f"{function.__name__.strip('_')}_of_{kind.__name__}")
        _STEPS[key] = FunctionType(code, function.__globals__, code.co_name)
    return _STEPS[key]


# Classes of modules that were called, whose graphs may be there.
_CALLED: weakref.WeakSet[type] = weakref.WeakSet()

# Modules of one class share a code object, and with it their graphs.
_STEPS: dict[tuple[Callable[..., Any], type], Callable[..., Any]] = {}
