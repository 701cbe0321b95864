"""The compiled call of a module: inside of the module's own hooks, and once for all modules of its class.

`trace_gate` decides which of its frames Dynamo traces, and when.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from deepytorch.class_state import ClassState
from deepytorch.compiler.budget import BUDGET
from deepytorch.compiler.code.worker.queue import MODEL, expect
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamo.asserted_scalars import asserts_scalars
from deepytorch.compiler.dynamo.settings import prepare_dynamo
from deepytorch.compiler.dynamo.sizes import marked_ahead
from deepytorch.compiler.dynamo.trace_gate import TraceGate, TraceHistory
from deepytorch.torch_internals import TorchCompileWrapper, compile_by_frames, reset_dynamo


def compiled_call(
    kind: type,
    mode: str | None,
    options: dict[str, Any] | None,
    first_seconds: float = 0.0,
    packs_in_eager: bool = True,
) -> Callable[..., Any]:
    """Return the call of modules of one class: compiled whole, or inside of the module's own hooks if it has some.

    Hooks on the outermost module belong to the framework that runs the loop (DeepSpeed counts steps in one). Dynamo
    would compile them, and compile anew when their counts change.

    Args:
        kind: The class.
        mode: The mode of `torch.compile`.
        options: The options of `torch.compile`.
        first_seconds: An estimate of the first trace's time; that trace has been decided on.
        packs_in_eager: As for `TraceHistory`.
    """
    config = CompilerConfig.parse(mode, options)
    own = _own_code(kind)
    whole, inner = (own.compiled(function, mode, options, config.waits) for function in (step, _inner_step))
    history = own.history
    history.first_seconds, history.granted = max(history.first_seconds, first_seconds), True
    history.packs_in_eager = packs_in_eager

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        paused, model = BUDGET.paused, MODEL.set(kind.__name__)
        is_known = type(module) in _CALLED
        if history.asserts_scalars is None:
            history.asserts_scalars = asserts_scalars(module)
        try:
            with contextlib.nullcontext() if is_known else _first_call(module, args, kwargs, config):
                forward = module.forward
                busy = (
                    isinstance(forward, partial) and forward.func is inner
                )  # in another thread, or above on the stack
                if busy or not (module._forward_pre_hooks or module._forward_hooks or module._backward_hooks):
                    return whole(module, *args, **kwargs)
                with _set_forward(module, partial(inner, forward)):
                    return module._call_impl(*args, **kwargs)
        finally:
            MODEL.reset(model)
            history.granted = False
            if BUDGET.paused != paused:  # something was traced
                own.classes.add(module)

    return call


def step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module; this function is compiled.

    (`Module.compile` gives Dynamo `_call_impl`, which Dynamo does not trace for torch's own modules.)
    """
    return module._call_impl(*args, **kwargs)


def _inner_step(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module with hooks; this function is compiled."""
    return forward(*args, **kwargs)


@contextlib.contextmanager
def _first_call(module: nn.Module, args: Any, kwargs: Any, config: CompilerConfig) -> Iterator[None]:
    """Prepare for the first call of a class: mark its batch, so that one trace is enough, and start the worker.

    See `marked_ahead` and `expect`. Marks on the arguments of a later call would make Dynamo compile anew.
    """
    kind = type(module)
    _CALLED.add(kind)
    prepare_dynamo()
    kinds = ("cpu", "cuda") if config.compiles_from_sizes else ("cpu",)
    if not config.waits and all(each.device.type in kinds for each in module.parameters()):
        expect(kind.__name__)
    with marked_ahead(module, args, kwargs) if config.unpad else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give `module` this forward inside of the block, unless somebody gives it another one."""
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


def _own_code(kind: type) -> _OwnCode:
    """Return the compiled code of a class; start anew if the class, or the class of a part, has been changed since.

    A change makes everything useless that was compiled of the class, and of frames that others may share with it.
    """
    if kind in _OWN and _OWN[kind].classes.has_changed():
        reset_dynamo()
        _OWN.clear()
    return _OWN.setdefault(kind, _OwnCode(kind.__name__))


class _OwnCode:
    """The compiled code of the modules of one class, and the history of its traces.

    The class has functions with code objects of their own, since Dynamo keeps graphs by code object.
    """

    def __init__(self, name: str) -> None:
        self._name, self.history, self.classes = name, TraceHistory(), ClassState()
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def compiled(
        self, function: Callable[..., Any], mode: str | None, options: dict[str, Any] | None, waits: bool
    ) -> Callable[..., Any]:
        """Return a callable that runs `function` compiled, frame by frame as the gate lets them be traced."""
        if function not in self._functions:
            code = function.__code__.replace(co_name=f"{function.__name__.strip('_')}_of_{self._name}")
            self._functions[function] = FunctionType(code, function.__globals__, code.co_name)
        mode = "default" if mode is None and options is None else mode  # as `torch.compile` has it
        context = compile_by_frames(backend=TorchCompileWrapper("deepytorch", mode, options, None))
        context.callback = TraceGate(context.callback, self._name, self.history, waits)
        return context(self._functions[function])


# Classes of modules that were called, so that graphs of them may exist.
_CALLED: weakref.WeakSet[type] = weakref.WeakSet()

# Modules of one class share code objects, and with them their graphs.
_OWN: weakref.WeakKeyDictionary[type, _OwnCode] = weakref.WeakKeyDictionary()
