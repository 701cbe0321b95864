"""The arming of modules by `import deepytorch`: the outermost module of a training step is compiled in place.

An optimizer names the parameters that are trained. When an optimizer is made, every module that holds one of its
parameters, itself or in a submodule, gets a probe. The first probed module that is called in training is the outermost
one of a step, or of a part of a step: a generator and a discriminator each are. It is armed at that call, and beside it
the models of libraries that no optimizer trains, such as a teacher: their calls without gradients are packed at model
entry. Nothing else is touched.

Nothing wraps the module. `nn.Module.__call__` looks for a compiled call in the instance (`_compiled_call_impl`, which
`Module.compile` sets). Probes stand there, and later a call that decides each time whether it trains, so that
evaluation and generation stay in eager. Pickles, copies and state_dicts leave the attribute out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepytorch.config import Environment
from deepytorch.errors import ConfigError
from deepytorch.first_steps import FirstSteps
from deepytorch.handles import (
    HANDLES,
    FrozenHandle,
    Handle,
    Handles,
    ModelEntry,
    armed,
    armed_call,
    draws_of,
    entry_of,
    first_entry_of,
    handle_of,
    needs_entry,
    packs_from_start,
    restore,
    take_out,
)
from deepytorch.kept_memory import MEMORY
from deepytorch.log import logger, once
from deepytorch.module_holders import holders_of, holds, is_layer, models_beside
from deepytorch.parallel_modules import is_divided, is_fsdp, is_partitioned, is_sharded, unwrapped
from deepytorch.patches import apply_all, undo_all
from deepytorch.switch import SWITCH
from deepytorch.torch_internals import OptimizedModule
from deepytorch.training_calls import (
    is_traced,
    is_transformed,
    trains,
)

if TYPE_CHECKING:
    from deepytorch.comm import Options
    from deepytorch.compiler.outcome import Outcome
    from deepytorch.compiler.report import RegionRecord

_LOCK = threading.Lock()
_PROBED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SETTINGS: dict[str, Any] = {"mode": None, "options": None}  # for modules that the import arms
# Integrations add to these three.
LOOPS: list[Callable[[nn.Module], bool]] = []  # return whether a module's call is a step of a loop, not a model's
# Return the backbone of a module under a head that no graph can hold; the backbone is compiled in the module's place.
BACKBONES: list[Callable[[nn.Module], nn.Module | None]] = []
LEFT_ALONE: dict[str, str] = {}  # package -> the message on its modules, which are not armed


def optimize(model: nn.Module, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Handle:
    """Compile `model` in place for training now; the import does the same at the model's first training call.

    mode, options: as for `torch.compile(model, backend="deepytorch", ...)`. In a DistributedDataParallel or another
    wrapper the inner module is compiled; with FSDP2 each block; under TRL's fused head the backbone. Returns a handle
    whose `restore()` undoes this. Raises `ConfigError` for an unknown option, or for a model that is compiled already.
    """
    from deepytorch.compiler.config import CompilerConfig

    CompilerConfig.parse(mode, options)
    if is_compiled(model) or is_compiled(_compiled_part(model)):
        raise ConfigError(f"{type(model).__name__} is compiled already; expected a module that is not, or one of ours")
    handles = _arm_all(model, mode, options)
    return handles[0] if len(handles) == 1 else Handles(handles)


def configure(
    *, mode: str | None = None, options: dict[str, Any] | None = None, process_groups: bool | Options = True
) -> None:
    """Configure the import's behaviour from now on.

    mode, options: for compiled modules, as for `optimize`. process_groups: whether `init_process_group` and `new_group`
    give the deepytorch backend if gloo or nccl is asked for; a `deepytorch.comm.Options`: they do, with these options.
    Raises `ConfigError` for an unknown option.
    """
    from deepytorch.compiler.config import CompilerConfig

    CompilerConfig.parse(mode, options)
    _SETTINGS.update(mode=mode, options=options)
    SWITCH.process_groups = process_groups is not False
    SWITCH.group_options = None if isinstance(process_groups, bool) else process_groups


def least_padding() -> float | None:
    """Return the least share of pads for which the import packs a batch; None if it is to pack none."""
    from deepytorch.compiler.config import CompilerConfig

    config = CompilerConfig.parse(None, _SETTINGS["options"])
    return config.min_padding if config.unpad and config.defer_outputs else None


def compile(model: Any = None, **kwargs: Any) -> Any:  # noqa: A001, the name that torch has for it
    """Call `torch.compile(model, backend="deepytorch", **kwargs)`."""
    return torch.compile(model, backend="deepytorch", **kwargs)


def disable() -> None:
    """Disarm all modules, undo all changes of other libraries (`patches`), and arm nothing from now on."""
    SWITCH.enabled = False
    _leave_alone(*_PROBED)
    for module in list(HANDLES):
        restore(module)
    undo_all()


def enable() -> None:
    """Arm modules that are called from now on, after `disable()`."""
    SWITCH.enabled = True
    apply_all()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Run armed modules in eager, and arm nothing, inside of the block."""
    SWITCH.paused += 1
    try:
        yield
    finally:
        SWITCH.paused -= 1


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Put probes on the modules that hold this optimizer's parameters."""
    if not SWITCH.enabled or SWITCH.paused or not Environment.read().enabled:
        return
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    with _LOCK:
        found = holders_of(trained)
        packages = {type(each).__module__.partition(".")[0] for each in found}
        if packages & LEFT_ALONE.keys():
            once(logging.INFO, "%s", " ".join(LEFT_ALONE[name] for name in sorted(packages & LEFT_ALONE.keys())))
        elif any(isinstance(each, nn.DataParallel) for each in found):  # its copies would call the original
            once(logging.INFO, "a model in DataParallel is left as it is; DistributedDataParallel is compiled")
        elif any(is_compiled(each) for each in found):
            names = sorted({type(each).__name__ for each in found if is_compiled(each)})
            once(logging.INFO, "%s is compiled already: left as it is", ", ".join(names))
        elif not any(each in HANDLES and not isinstance(handle_of(each), FrozenHandle) for each in found):
            for each in found:
                if each in HANDLES:
                    restore(each)
                each._compiled_call_impl = MethodType(_probe, each)
                _PROBED.add(each)


def is_compiled(module: nn.Module) -> bool:
    """Return whether somebody else has compiled a module."""
    if isinstance(module, OptimizedModule):
        return True
    return module._compiled_call_impl is not None and module not in _PROBED and module not in HANDLES


@contextlib.contextmanager
def calls_go_to(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Make calls of `module` run `call` inside of the block."""
    before = vars(module).get("_compiled_call_impl")
    module._compiled_call_impl = call
    try:
        yield
    finally:
        take_out(module)
        if before is not None:
            module._compiled_call_impl = before


def _probe(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a probed module; arm the module if it turns out to be the outermost one of a training step."""
    if is_traced() or not module.training or is_transformed():
        return module._call_impl(*args, **kwargs)
    if not trains(module) or any(runs_a_step(module) for runs_a_step in LOOPS):
        with draws_of(module):
            return module._call_impl(*args, **kwargs)
    with _LOCK:
        if module in _PROBED:
            holders = [each for each in _PROBED if each is not module and holds(each, module)]
            _leave_alone(module, *module.modules(), *([] if is_layer(module) else holders))
            if not (armed(module) or (holders and is_layer(module))):  # `optimize` may have been called on a part
                _arm_in_training(module)
    # Not `module(...)`: a class may have a `__call__` of its own, which is running already.
    call = module._compiled_call_impl or module._call_impl
    return call(*args, **kwargs)


def _arm_in_training(module: nn.Module) -> None:
    """Arm a module, and models that are not trained; leave one alone whose weights stay DTensors in its forward."""
    from deepytorch.compiler.report import LEDGER, RegionRecord

    if is_divided(module):  # a trace of 2 layers takes a minute on two cores, and its graph cannot be compiled
        reason = "its weights are divided between ranks, as under tensor parallelism: it runs in eager"
        logger.info("%s: %s", type(module).__name__, reason)
        LEDGER.open(RegionRecord(type(module).__name__, "eager", "", declined=[reason]))
        return
    _arm_all(module, _SETTINGS["mode"], _SETTINGS["options"])
    _arm_models_beside(module)


def _arm_models_beside(module: nn.Module) -> None:
    """Arm the models that are not trained, as a model that is begins its first training call."""
    for each in models_beside(module):
        taken = is_compiled(each) or each in _PROBED or armed(each)
        if not (taken or is_sharded(each)):
            _keep(each, FrozenHandle(each, _SETTINGS["options"]))
            logger.info("armed %s, which is not trained: its calls without gradients", type(each).__name__)


def _leave_alone(*modules: nn.Module) -> None:
    """Remove the probes of modules."""
    for each in modules:
        if each in _PROBED:
            _PROBED.discard(each)
            take_out(each)


def explain_entry(
    model: nn.Module, found: Sequence[Outcome], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RegionRecord | None:
    """Return the record of packing at a model's entry for a call whose graphs had the outcomes `found`.

    None if the call would not be packed at entry.
    """
    module = _compiled_part(model)
    entry = entry_of(module, None)  # a separate one: that of an armed module learns in training
    packs = packs_from_start(module, entry) or needs_entry(module, found) or is_partitioned(module)
    packs = packs or (entry is not None and entry.is_the_only_way_for(kwargs))
    if entry is None or not (packs or any(map(is_fsdp, module.modules()))):
        return None
    handle = handle_of(module)
    armed_entry = None if handle is None else handle.entry
    if armed_entry is not None and armed_entry.asked:
        return armed_entry.explain(args, kwargs)
    try:
        return entry.explain(args, kwargs)
    finally:
        entry.restore()


def disarm_inside(module: nn.Module) -> None:
    """Disarm the parts of a module, which run in eager from now on."""
    for part in module.modules():
        if part is not module:
            restore(part)


def backbone_of(model: nn.Module) -> nn.Module | None:
    """Return the backbone that is compiled of a model under a head that no graph can hold.

    None if the model itself is compiled, or its blocks in case of sharded or partitioned weights.
    """
    if is_partitioned(model) or any(map(is_fsdp, model.modules())):
        return None
    return next((part for find in BACKBONES if (part := find(model)) is not None), None)


def _compiled_part(model: nn.Module) -> nn.Module:
    module = unwrapped(model)
    return backbone_of(module) or module


def _arm_all(module: nn.Module, mode: str | None, options: dict[str, Any] | None) -> list[Handle]:
    """Arm a module: the inner one of a data-parallel wrapper; of a sharded module, each block."""
    module = _compiled_part(module)
    sharded = [each for each in module.modules() if is_fsdp(each)]
    blocks = [each for each in sharded if each is not module]
    blocks = [each for each in blocks if not any(other is not each and is_fsdp(other) for other in each.modules())]
    if not blocks:
        return [_arm(module, mode, options)]
    from deepytorch.compiler.compile_module import step

    entry = entry_of(module, options)
    handles = [_arm(each, mode, options) for each in blocks]
    if entry is not None and module not in HANDLES:
        handles.append(_keep(module, Handle(module, step, entry, sharded=True)))
    return handles


def _arm(module: nn.Module, mode: str | None, options: dict[str, Any] | None) -> Handle:
    known = handle_of(module)
    if isinstance(known, FrozenHandle):  # it was not trained until now
        known.restore()
    elif known is not None:
        return known
    from deepytorch.compiler.config import CompilerConfig

    if CompilerConfig.parse(mode, options).waits or is_partitioned(module):
        compiled, entry = _compiled(module, mode, options)
        handle = Handle(module, compiled, entry, sharded=entry is not None and is_partitioned(module))
    else:
        this = weakref.ref(module)
        first = FirstSteps(
            module,
            lambda: first_entry_of(_alive(this), options),
            lambda cost, packs: _compiled(_alive(this), mode, options, cost, packs),
        )
        handle = Handle(module, _not_yet, first=first)
    _keep(module, handle)
    trained = [each for each in module.parameters() if each.requires_grad]
    if any(each.device.type == "cpu" for each in trained):
        MEMORY.keep()
    count = sum(getattr(each, "ds_numel", each.numel()) for each in trained)
    logger.info(
        "armed %s (%s trained parameters): its training calls are compiled", type(module).__name__, f"{count:,}"
    )
    return handle


def _alive(module: weakref.ref[nn.Module]) -> nn.Module:
    found = module()
    assert found is not None  # its call runs
    return found


def _not_yet(*_: Any, **__: Any) -> Any:
    raise AssertionError("a call of a module that is not compiled yet")


def _compiled(
    module: nn.Module,
    mode: str | None,
    options: dict[str, Any] | None,
    first_seconds: float = 0.0,
    packs_in_eager: bool = True,
) -> tuple[Callable[..., Any], ModelEntry | None]:
    """Return the callable of a module's training calls, and its `ModelEntry`.

    Other arguments: as for `compiled_call`.
    """
    from deepytorch.compiler.compile_module import compiled_call, step

    entry = entry_of(module, options)
    partitioned = entry is not None and is_partitioned(module)
    return (step if partitioned else compiled_call(type(module), mode, options, first_seconds, packs_in_eager)), entry


def _keep(module: nn.Module, handle: Handle) -> Handle:
    HANDLES[module] = weakref.ref(handle)
    _leave_alone(*module.modules())
    module._compiled_call_impl = partial(armed_call, handle, module)
    return handle
