"""What `import deepytorch` arms: the outermost module of a training step, compiled in place at its first training call.

An optimizer names the parameters that are trained. From its making on, the first module that is called in training with
one of them is the outermost one of a step, or of its part: a generator and a discriminator have an optimizer each. What
no optimizer trains is never touched: teachers, frozen encoders, averaged copies, inference.

Nothing wraps the module. `nn.Module.__call__` looks for a compiled call in the instance (`_compiled_call_impl`, what
`Module.compile` sets); ours decides at each call whether it trains, so that evaluation and generation stay in eager.
Pickles, copies and state_dicts leave it out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from deepytorch.config import Environment
from deepytorch.log import logger, once
from deepytorch.switch import SWITCH

_LOCK = threading.Lock()
_LISTENERS: list[Any] = []  # a global hook of torch's, only while an optimizer waits for its module
# By id, parameters of optimizers whose modules were not called yet (a set would compare tensors).
_WAITING: dict[int, weakref.ref[nn.Parameter]] = {}
_HANDLES: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()
_SETTINGS: dict[str, Any] = {"mode": None, "options": None}  # of what the import arms
_STEPS: dict[type, Callable[..., Any]] = {}  # modules of one class share a code object, and with it their graphs


class Handle:
    """One module that was armed."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self.call = call
        module._compiled_call_impl = call

    def restore(self) -> None:
        """Take everything back: the module is as it was."""
        module = self._module()
        if module is not None:
            if module.__dict__.get("_compiled_call_impl") is self.call:
                del module.__dict__["_compiled_call_impl"]
            _HANDLES.pop(module, None)


def optimize(model: nn.Module, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Handle:
    """Compile `model` in place for training, now: the explicit form of what the import does at its first training call.

    mode, options: as `torch.compile(model, backend="deepytorch", ...)` takes them. Of a DistributedDataParallel or
    another module that wraps one, the inner one is compiled; of FSDP2 modules, each block. Returns a handle whose
    `restore()` undoes it. Raises `ConfigError` for an option that is not known.
    """
    from deepytorch.compiler.config import CompilerConfig

    CompilerConfig.parse(mode, options)
    handles = [_arm(part, mode, options) for part in _parts(model)]
    return handles[0] if len(handles) == 1 else _Several(handles)


def configure(*, mode: str | None = None, options: dict[str, Any] | None = None, process_groups: bool = True) -> None:
    """What the import does from now on.

    mode, options: how modules are compiled, as `optimize` takes them. process_groups: whether `init_process_group`
    gives the deepytorch backend where gloo or nccl was asked for. Raises `ConfigError` for an option that is not known.
    """
    from deepytorch.compiler.config import CompilerConfig

    CompilerConfig.parse(mode, options)
    _SETTINGS.update(mode=mode, options=options)
    SWITCH.process_groups = process_groups


def compile(model: Any = None, **kwargs: Any) -> Any:  # noqa: A001, the name that torch has for it
    """`torch.compile(model, backend="deepytorch", **kwargs)`."""
    return torch.compile(model, backend="deepytorch", **kwargs)


def disable() -> None:
    """Undo what the import has armed, and arm nothing from now on."""
    SWITCH.enabled = False
    _stop_listening()
    for handle in list(_HANDLES.values()):
        handle.restore()


def enable() -> None:
    """Arm again what is called from now on, after `disable()`."""
    SWITCH.enabled = True


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, modules that were armed run in eager, and nothing is armed."""
    SWITCH.paused += 1
    try:
        yield
    finally:
        SWITCH.paused -= 1


def armed(model: nn.Module) -> bool:
    """Whether some module in `model`, itself included, is compiled in place by us."""
    return any(module in _HANDLES for module in model.modules())


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Listen for the module that this optimizer's parameters are trained in."""
    if not SWITCH.enabled or SWITCH.paused or not Environment.read().enabled:
        return
    with _LOCK:
        waiting = [each for each in _parameters(optimizer) if each.requires_grad and isinstance(each, nn.Parameter)]
        _WAITING.update((id(each), weakref.ref(each)) for each in waiting)
        if _WAITING and not _LISTENERS:
            _LISTENERS.append(nn.modules.module.register_module_forward_pre_hook(_called))
    this = weakref.ref(optimizer)

    def stepped(*_: Any) -> None:  # who trains without calling a module is not waited for any longer
        handle.remove()
        found = this()
        if found is not None:
            with _LOCK:
                _forget(_parameters(found))

    handle = optimizer.register_step_post_hook(stepped)


def _called(module: nn.Module, arguments: Any) -> None:
    if not (module.training and torch.is_grad_enabled()) or SWITCH.paused or torch.compiler.is_compiling():
        return
    with _LOCK:
        found = [each for each in module.parameters() if _is_waiting(each)]
        _forget(found)
    if found:
        for part in _parts(module):
            with contextlib.suppress(_LeftAlone):
                _arm(part, _SETTINGS["mode"], _SETTINGS["options"])


class _LeftAlone(Exception):
    pass


class _Several(Handle):
    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def restore(self) -> None:
        for handle in self._handles:
            handle.restore()


def _parts(module: nn.Module) -> list[nn.Module]:
    """What of a module is to be compiled: what a data-parallel wrapper holds; the blocks of a sharded one."""
    inner = getattr(module, "module", None)
    if isinstance(module, nn.parallel.DistributedDataParallel) or (
        type(module).__module__.startswith("deepspeed.") and isinstance(inner, nn.Module)
    ):
        assert isinstance(inner, nn.Module)
        return _parts(inner)
    sharded = [each for each in module.modules() if _is_sharded(each)]
    blocks = [each for each in sharded if each is not module]
    if not blocks:
        return [module]
    return [each for each in blocks if not any(other is not each and _is_sharded(other) for other in each.modules())]


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _arm(module: nn.Module, mode: str | None, options: dict[str, Any] | None) -> Handle:
    known = _HANDLES.get(module)
    if known is not None:
        return known
    if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
        once(logging.INFO, "%s is compiled already: left as it is", type(module).__name__)
        raise _LeftAlone
    compiled = torch.compile(_step_of(module), backend="deepytorch", mode=mode, options=options)
    this = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = this()
        assert target is not None
        if SWITCH.paused or not target.training or not torch.is_grad_enabled() or _in_another_trace():
            return target._call_impl(*args, **kwargs)
        return compiled(target, *args, **kwargs)

    handle = Handle(module, call)
    _HANDLES[module] = handle
    count = sum(each.numel() for each in module.parameters() if each.requires_grad)
    logger.info(
        "armed %s (%s trained parameters): its training calls are compiled", type(module).__name__, f"{count:,}"
    )
    return handle


def _in_another_trace() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.jit.is_scripting()


def _step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled. (`Module.compile` gives Dynamo `_call_impl`, which it leaves alone for torch's own modules.)"""
    return module._call_impl(*args, **kwargs)


def _step_of(module: nn.Module) -> Callable[..., Any]:
    kind = type(module)
    if kind not in _STEPS:
        code = _step.__code__.replace(co_name=f"step_of_{kind.__name__}")
        _STEPS[kind] = FunctionType(code, _step.__globals__, code.co_name)
    return _STEPS[kind]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _is_waiting(parameter: torch.Tensor) -> bool:
    waiting = _WAITING.get(id(parameter))
    return waiting is not None and waiting() is parameter


def _forget(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        _WAITING.pop(id(parameter), None)
    for key in [key for key, waiting in _WAITING.items() if waiting() is None]:
        del _WAITING[key]
    if not _WAITING:
        _stop_listening()


def _stop_listening() -> None:
    while _LISTENERS:
        _LISTENERS.pop().remove()


def install(torch_module: Any) -> None:
    """Listen to every optimizer that is made from now on. `torch_module`: torch, as it has just been imported."""
    base = torch_module.optim.Optimizer
    original = base.__init__
    if hasattr(original, "_deepytorch_original"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watch(self)

    __init__._deepytorch_original = original  # type: ignore[attr-defined]
    base.__init__ = __init__
