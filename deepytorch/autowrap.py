"""The arming of modules by `import deepytorch`: the outermost module of a training step is compiled in place.

An optimizer names the parameters that are trained. When an optimizer is made, every module that holds one of its
parameters, itself or in a submodule, gets a probe. The first probed module that is called in training is the outermost
one of a step, or of a part of a step: a generator and a discriminator each are. It is armed at that call. Modules that
no optimizer trains are never touched: teachers, frozen encoders, averaged copies, inference.

Nothing wraps the module. `nn.Module.__call__` looks for a compiled call in the instance (`_compiled_call_impl`, which
`Module.compile` sets). Probes stand there, and later a call that decides each time whether it trains, so that
evaluation and generation stay in eager. Pickles, copies and state_dicts leave the attribute out.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from deepytorch.class_state import ClassState
from deepytorch.compiler.budget import BUDGET
from deepytorch.config import Environment
from deepytorch.errors import ConfigError
from deepytorch.first_steps import FirstEntry, FirstSteps
from deepytorch.forward_only import ForwardOnly, may_have_padding
from deepytorch.library_code import is_of_libraries
from deepytorch.log import logger, once
from deepytorch.patches import apply_all, listen, undo_all
from deepytorch.switch import SWITCH
from deepytorch.torch_internals import OptimizedModule
from deepytorch.training_calls import (
    RepeatedDraws,
    is_of_the_scripts,
    is_ours_to_run,
    is_traced,
    is_transformed,
    of_subclasses,
    trains,
)

if TYPE_CHECKING:
    from deepytorch.comm import Options
    from deepytorch.compiler.outcome import Outcome
    from deepytorch.compiler.report import RegionRecord

_LOCK = threading.Lock()
_PROBED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Handles of armed modules. A handle belongs to its module's call and dies with it: its `ModelEntry` holds the module.
_HANDLES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
_DRAWS: weakref.WeakKeyDictionary[nn.Module, RepeatedDraws] = weakref.WeakKeyDictionary()  # of armed and probed modules
_MODULES: _Modules | None = None  # as the last walk found them; None if they have changed since
_SETTINGS: dict[str, Any] = {"mode": None, "options": None}  # for modules that the import arms
# Integrations add to the following six. ENTRIES: make the `ModelEntry` of a module, if it can be packed there, given
# the least share of pads worth packing.
ENTRIES: list[Callable[[nn.Module, float], ModelEntry | None]] = []
LOOPS: list[Callable[[nn.Module], bool]] = []  # return whether a module's call is a step of a loop, not a model's
# Return the backbone of a module under a head that no graph can hold; the backbone is compiled in the module's place.
BACKBONES: list[Callable[[nn.Module], nn.Module | None]] = []
MODELS: list[Callable[[nn.Module], bool]] = []  # return whether a module can be packed at entry, if it is frozen
BEFORE_TRACES: list[Callable[[nn.Module, Mapping[str, Any]], None]] = []  # prepare a module for the first such call
LEFT_ALONE: dict[str, str] = {}  # package -> the message on its modules, which are not armed


class ModelEntry(FirstEntry, Protocol):
    """The packing at a module's entry, through which its training calls go if no graph of it is packed."""

    @property
    def asked(self) -> bool:
        """Return whether some kind of call was proved or declined."""
        ...

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RegionRecord:
        """Return the record of a training call with these arguments, without running it."""
        ...


class Handle:
    """One module that was armed.

    Args:
        module: The module.
        compiled: Runs its training calls, given the module and the arguments.
        entry: The packing at its entry, if it has one. It is used if Dynamo cuts the module into several graphs, or
            cannot analyse one. It is used at once if this is known ahead: with partitioned weights (`sharded`), and if
            no graph of the module can be packed.
        sharded: Whether weights are partitioned.
        first: Runs the calls before the module is compiled, see `first_steps`.
    """

    def __init__(
        self,
        module: nn.Module,
        compiled: Callable[..., Any],
        entry: ModelEntry | None = None,
        sharded: bool = False,
        first: FirstSteps | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.compiled, self.entry = compiled, entry
        self._outcomes: list[Outcome] = []  # of its graphs
        self._looked, self._packs_at_entry = False, sharded or _packs_from_start(module, entry)
        self._first, self._begun, self._prepared = first, first is None, False
        self._classes, self._paused = ClassState(module), BUDGET.paused
        self._forward_only, self._sharded = ForwardOnly(waits=first is None), sharded

    def is_outdated(self) -> bool:
        """Return whether the script has changed a class of the model's since the module was armed.

        To be called at the begin of each call. After a change the module runs in eager from then on.
        """
        module = self._module()
        assert module is not None  # its call runs
        if self._paused != BUDGET.paused:  # after a pause: the module may have been traced with other parts
            self._classes.add(module)
            self._paused = BUDGET.paused
        if not self._classes.has_changed():
            return False
        if self._first is not None and not self._first.has_looked():  # nothing depends on the model's classes yet
            self._classes = ClassState(module)
            return False
        once(
            logging.INFO,
            "%s runs in eager from now on: one of its modules' classes has been changed since it was looked at",
            type(module).__name__,
        )
        self.restore()
        return True

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a training call."""
        if self._first is not None and not self._first.over():
            return self._first.call(module, args, kwargs)
        if not self._begun:
            assert self._first is not None
            self._first.restore()
            self.compiled, self.entry, self._begun = *self._first.then(), True
            if _shares_weights(module):  # ranks come here in steps of their own
                self.entry = None
            self._packs_at_entry = _packs_from_start(module, self.entry)
        if self._first is not None:
            return self._first.timed(partial(self._compiled_call, module), args, kwargs)
        return self._compiled_call(module, *args, **kwargs)

    def without_gradients(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call without gradients, packed at entry if possible. Sharded weights stay with their framework."""
        if self._sharded:
            return module._call_impl(*args, **kwargs)
        entry = self.entry if self._begun or self._first is None else self._first.entry
        try:
            return self._forward_only.call(entry, module, args, kwargs)
        finally:
            if entry is self.entry and entry is not None and entry.replaces_calls and not self._packs_at_entry:
                entry.restore()  # training goes by graphs

    def _compiled_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._prepared:
            self._prepared = True
            for prepare in BEFORE_TRACES:
                prepare(module, kwargs)
        if self.entry is None:
            return self.compiled(module, *args, **kwargs)
        if self._packs_at_entry:
            return self.entry.call(partial(self.compiled, module), args, kwargs)
        if self._looked:
            return self.compiled(module, *args, **kwargs)
        from deepytorch.compiler.outcome import Outcome, outcomes

        with outcomes() as found:
            outputs = self.compiled(module, *args, **kwargs)
        self._outcomes += found
        self._looked = Outcome.PUT_OFF not in found  # else some frames of the module are traced later
        self._packs_at_entry = _needs_entry(module, self._outcomes)
        return outputs

    def restore(self) -> None:
        """Disarm the module, which is then as it was before."""
        module = self._module()
        if module is not None and handle_of(module) is self:
            del _HANDLES[module]
            _take_out(module)
            for each in (self.entry, self._first):
                if each is not None:
                    each.restore()


class FrozenHandle(Handle):
    """A model that nobody trains, such as a teacher or a reference: calls without gradients are packed at its entry.

    options: as for `optimize`.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any] | None) -> None:
        super().__init__(module, _as_it_is)
        self._options, self._asked = options, False
        self._forward_only = ForwardOnly(waits=_waits(options))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call with gradients, which go through the model to its inputs: in eager."""
        return module._call_impl(*args, **kwargs)

    def without_gradients(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call without gradients, packed at entry if possible.

        In training mode it may draw, and all that the script draws later would be other numbers.
        """
        if module.training:
            return module._call_impl(*args, **kwargs)
        if not self._asked and may_have_padding(kwargs):
            self.entry, self._asked = _first_entry_of(module, self._options), True
        return self._forward_only.call(self.entry, module, args, kwargs)


def _as_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _waits(options: dict[str, Any] | None) -> bool:
    from deepytorch.compiler.config import CompilerConfig

    return CompilerConfig.parse(None, options).waits


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
    return handles[0] if len(handles) == 1 else _Several(handles)


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
    for module in list(_HANDLES):
        _restore(module)
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


def armed(model: nn.Module) -> bool:
    """Return whether some module in `model`, itself included, is compiled in place by us."""
    return any(module in _HANDLES for module in model.modules())


def handle_of(module: nn.Module) -> Handle | None:
    """Return the handle of an armed module, or None."""
    found = _HANDLES.get(module)
    return None if found is None else found()


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Put probes on the modules that hold this optimizer's parameters."""
    if not SWITCH.enabled or SWITCH.paused or not Environment.read().enabled:
        return
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    with _LOCK:
        found = _holders(trained)
        packages = {type(each).__module__.partition(".")[0] for each in found}
        if packages & LEFT_ALONE.keys():
            once(logging.INFO, "%s", " ".join(LEFT_ALONE[name] for name in sorted(packages & LEFT_ALONE.keys())))
        elif any(isinstance(each, nn.DataParallel) for each in found):  # its copies would call the original
            once(logging.INFO, "a model in DataParallel is left as it is; DistributedDataParallel is compiled")
        elif any(is_compiled(each) for each in found):
            names = sorted({type(each).__name__ for each in found if is_compiled(each)})
            once(logging.INFO, "%s is compiled already: left as it is", ", ".join(names))
        elif not any(each in _HANDLES and not isinstance(handle_of(each), FrozenHandle) for each in found):
            for each in found:
                if each in _HANDLES:
                    _restore(each)
                each._compiled_call_impl = MethodType(_probe, each)
                _PROBED.add(each)


class _Modules:
    """The holders of parameters and modules, held weakly, as one walk over all living objects has found them.

    Parameters that were made since are not known.
    """

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._owners, self._parents = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._models: list[weakref.ref[nn.Module]] = []  # those that can be packed at entry
        for each in trained:
            self._owners[each] = []  # until a module is found that holds it
        for module in gc.get_objects():
            if issubclass(type(module), nn.Module) and "_modules" in vars(module):
                this = weakref.ref(module)
                for holders, held in ((self._owners, module._parameters), (self._parents, module._modules)):
                    for each in held.values():
                        if each is not None:
                            holders.setdefault(each, []).append(this)
                if any(is_model(module) for is_model in MODELS):
                    self._models.append(this)

    def models_beside(self, trained: Collection[nn.Module]) -> list[nn.Module]:
        """Return the outermost models that can be packed at entry, and neither hold one of `trained` nor are held."""
        alive = [model for each in self._models if (model := each()) is not None]
        apart = {id(each) for each in (*trained, *alive)}
        return [model for model in alive if model not in trained and not apart & self._holders_of(model)]

    def _holders_of(self, module: nn.Module) -> set[int]:
        """Return the ids of all modules around a module."""
        found: set[int] = set()
        left = [module]
        while left:
            inner = left.pop()
            parents = [parent() for parent in self._parents.get(inner, ())]
            around = [each for each in parents if each is not None and _has(each._modules, inner)]
            left += [each for each in around if id(each) not in found]
            found |= {id(each) for each in around}
        return found

    def holders(self, trained: Sequence[torch.Tensor]) -> list[nn.Module] | None:
        """Return every module that holds one of these parameters, itself or in a submodule.

        None if one of the parameters is not known, or is no longer where it was.
        """
        left: list[nn.Module] = []
        for each in trained:
            owners = self._owners.get(each)
            alive = [module for owner in owners or () if (module := owner()) is not None]
            if owners is None or (owners and not alive) or not all(_has(module._parameters, each) for module in alive):
                return None
            left += alive
        found: dict[int, nn.Module] = {}
        while left:
            module = left.pop()
            if id(module) not in found:
                found[id(module)] = module
                parents = [parent() for parent in self._parents.get(module, ())]
                left += [each for each in parents if each is not None and _has(each._modules, module)]
        return list(found.values())


def _has(held: Mapping[str, Any], one: Any) -> bool:
    return any(each is one for each in held.values())


def _holders(trained: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return every living module that holds one of these parameters, itself or in a submodule.

    A walk over all objects takes a fifth of a second in a large process. So there is a new walk only if something was
    registered in a module since the last one, or if a parameter is not known.
    """
    global _MODULES
    for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
        listen(register, _forget_modules, "learn when a module gets a part", _forget_modules)
    found = None if _MODULES is None else _MODULES.holders(trained)
    if found is None:
        _MODULES = _Modules(trained)
        found = _MODULES.holders(trained)
    return found or []


def _forget_modules(*_: Any) -> None:
    global _MODULES
    _MODULES = None


def is_compiled(module: nn.Module) -> bool:
    """Return whether somebody else has compiled a module."""
    if isinstance(module, OptimizedModule):
        return True
    return module._compiled_call_impl is not None and module not in _PROBED and module not in _HANDLES


@contextlib.contextmanager
def calls_go_to(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Make calls of `module` run `call` inside of the block."""
    before = vars(module).get("_compiled_call_impl")
    module._compiled_call_impl = call
    try:
        yield
    finally:
        _take_out(module)
        if before is not None:
            module._compiled_call_impl = before


def _take_out(module: nn.Module) -> None:
    module.__dict__.pop("_compiled_call_impl", None)


def _probe(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a probed module; arm the module if it turns out to be the outermost one of a training step."""
    if is_traced() or not module.training or is_transformed():
        return module._call_impl(*args, **kwargs)
    if not trains(module) or any(runs_a_step(module) for runs_a_step in LOOPS):
        with _draws_of(module):
            return module._call_impl(*args, **kwargs)
    with _LOCK:
        if module in _PROBED:
            holders = [each for each in _PROBED if each is not module and _holds(each, module)]
            _leave_alone(module, *module.modules(), *([] if _is_layer(module) else holders))
            if not (armed(module) or (holders and _is_layer(module))):  # `optimize` may have been called on a part
                _arm_all(module, _SETTINGS["mode"], _SETTINGS["options"])
                _arm_models_beside(module)
    # Not `module(...)`: a class may have a `__call__` of its own, which is running already.
    call = module._compiled_call_impl or module._call_impl
    return call(*args, **kwargs)


def _arm_models_beside(module: nn.Module) -> None:
    """Arm the models that are not trained, as a model that is begins its first training call."""
    if not MODELS:
        return
    trained = [each for each in module.parameters() if each.requires_grad]
    holders = _holders(trained)
    for each in _MODULES.models_beside(holders) if _MODULES is not None else ():
        taken = is_compiled(each) or each in _PROBED or armed(each)
        if not (taken or any(map(_is_sharded, each.modules())) or _is_partitioned(each) or _shares_weights(each)):
            _keep(each, FrozenHandle(each, _SETTINGS["options"]))
            logger.info("armed %s, which is not trained: its calls without gradients", type(each).__name__)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is a single layer of torch's, which has nothing to gain by itself.

    A script that calls an embedding, and then the model with what it gave, trains the model.
    """
    return not module._modules and type(module).__module__.startswith("torch.nn.")


def _leave_alone(*modules: nn.Module) -> None:
    """Remove the probes of modules."""
    for each in modules:
        if each in _PROBED:
            _PROBED.discard(each)
            _take_out(each)


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(each is inner for each in outer.modules())


def _armed_call(handle: Handle, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a call of an armed module."""
    trained = torch.is_grad_enabled()
    if is_traced() or is_transformed() or not (module.training or (not trained and may_have_padding(kwargs))):
        return module._call_impl(*args, **kwargs)  # under a transform a generator's state has no memory
    # An evaluation may well begin with a seed of its own each time; that says nothing of what training draws.
    draws = (_DRAWS.get(module) or _draws_of(module)) if module.training else None
    with draws or contextlib.nullcontext():
        if handle_of(module) is not handle or not is_ours_to_run() or handle.is_outdated():
            return module._call_impl(*args, **kwargs)
        if draws is not None and draws.found:
            _tell_repeated(module)
            return module._call_impl(*args, **kwargs)
        if special := of_subclasses(args, kwargs):
            if any(map(is_of_the_scripts, special)):
                return module._call_impl(*args, **kwargs)
            # These may be deferred outputs of another step, or of another model.
            from deepytorch.compiler.step.outputs.deferred import plain_arguments

            args, kwargs = plain_arguments(args, kwargs)  # type: ignore[assignment]
        return (handle if trained else handle.without_gradients)(module, *args, **kwargs)


def _draws_of(module: nn.Module) -> RepeatedDraws:
    found = _DRAWS.get(module)
    if found is None:
        first = next(module.parameters(), None)
        found = _DRAWS[module] = RepeatedDraws(torch.device("cpu") if first is None else first.device)
    return found


def _tell_repeated(module: nn.Module) -> None:
    once(
        logging.INFO,
        "%s runs in eager: the script has set a random generator back, so that calls are to draw the same numbers",
        type(module).__name__,
    )


class _Several(Handle):
    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def restore(self) -> None:
        for handle in self._handles:
            handle.restore()


def explain_entry(
    model: nn.Module, found: Sequence[Outcome], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RegionRecord | None:
    """Return the record of packing at a model's entry for a call whose graphs had the outcomes `found`.

    None if the call would not be packed at entry.
    """
    module = _compiled_part(model)
    entry = _entry_of(module, None)  # a separate one: that of an armed module learns in training
    packs = _packs_from_start(module, entry) or _needs_entry(module, found) or _is_partitioned(module)
    if entry is None or not (packs or any(map(_is_sharded, module.modules()))):
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
            _restore(part)


def _restore(module: nn.Module) -> None:
    handle = handle_of(module)
    if handle is not None:
        handle.restore()


def _needs_entry(module: nn.Module, found: Sequence[Outcome]) -> bool:
    """Return whether a module is to be packed at entry, since Dynamo has not packed all of it in one graph.

    That is: Dynamo cut a call into several graphs, or found one that cannot be analysed. Packing one graph of several
    does not last: the next one looks at pads of the values that are handed on. A proof at entry uses rows of a dozen
    tokens, which do not show how far a model reaches. So the module must be a library's, whose code is known to reach
    by attention alone; a user's code may join tokens any number of positions apart.
    """
    from deepytorch.compiler.outcome import Outcome

    graphs = [each for each in found if each not in (Outcome.PUT_OFF, Outcome.UNTRACEABLE)]
    return (len(graphs) > 1 or Outcome.UNTRACEABLE in found) and is_of_libraries(module)


def _packs_from_start(module: nn.Module, entry: ModelEntry | None) -> bool:
    """Return whether the module is packed at entry from the start, as its graphs cannot be packed anyway."""
    return entry is not None and entry.is_the_only_way and is_of_libraries(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model in a data-parallel wrapper or in DeepSpeed's engine."""
    inner = getattr(module, "module", None)
    if isinstance(inner, nn.Module) and (
        isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__module__.startswith("deepspeed.")
    ):
        return _unwrapped(inner)
    return module


def backbone_of(model: nn.Module) -> nn.Module | None:
    """Return the backbone that is compiled of a model under a head that no graph can hold.

    None if the model itself is compiled, or its blocks in case of sharded or partitioned weights.
    """
    if _is_partitioned(model) or any(map(_is_sharded, model.modules())):
        return None
    return next((part for find in BACKBONES if (part := find(model)) is not None), None)


def _compiled_part(model: nn.Module) -> nn.Module:
    module = _unwrapped(model)
    return backbone_of(module) or module


def _arm_all(module: nn.Module, mode: str | None, options: dict[str, Any] | None) -> list[Handle]:
    """Arm a module: the inner one of a data-parallel wrapper; of a sharded module, each block."""
    module = _compiled_part(module)
    sharded = [each for each in module.modules() if _is_sharded(each)]
    blocks = [each for each in sharded if each is not module]
    blocks = [each for each in blocks if not any(other is not each and _is_sharded(other) for other in each.modules())]
    if not blocks:
        return [_arm(module, mode, options)]
    from deepytorch.compiler.compile_module import step

    entry = _entry_of(module, options)
    handles = [_arm(each, mode, options) for each in blocks]
    if entry is not None and module not in _HANDLES:
        handles.append(_keep(module, Handle(module, step, entry, sharded=True)))
    return handles


def _entry_of(module: nn.Module, options: dict[str, Any] | None) -> ModelEntry | None:
    from deepytorch.compiler.config import CompilerConfig

    config = CompilerConfig.parse(None, options)
    if not config.unpad:
        return None
    return next((entry for make in ENTRIES if (entry := make(module, config.min_padding)) is not None), None)


def _first_entry_of(module: nn.Module, options: dict[str, Any] | None) -> ModelEntry | None:
    """Return the `ModelEntry` for the steps before a module is traced; None unless it reaches by attention alone.

    None for weights that ranks share: each rank would ask in a step of its own, and then wait for the others.
    """
    return _entry_of(module, options) if is_of_libraries(module) and not _shares_weights(module) else None


def _shares_weights(module: nn.Module) -> bool:
    """Return whether weights are DTensors, as under tensor parallelism."""
    return any(hasattr(each, "device_mesh") for each in module.parameters())


def _is_partitioned(module: nn.Module) -> bool:
    """Return whether ZeRO-3, whose hooks cut every graph, has partitioned the module's weights."""
    return any(hasattr(each, "ds_id") for each in module.parameters())


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _arm(module: nn.Module, mode: str | None, options: dict[str, Any] | None) -> Handle:
    known = handle_of(module)
    if isinstance(known, FrozenHandle):  # it was not trained until now
        known.restore()
    elif known is not None:
        return known
    from deepytorch.compiler.config import CompilerConfig

    if CompilerConfig.parse(mode, options).waits or _is_partitioned(module):
        compiled, entry = _compiled(module, mode, options)
        handle = Handle(module, compiled, entry, sharded=entry is not None and _is_partitioned(module))
    else:
        this = weakref.ref(module)
        first = FirstSteps(
            module,
            lambda: _first_entry_of(_alive(this), options),
            lambda cost, packs: _compiled(_alive(this), mode, options, cost, packs),
        )
        handle = Handle(module, _not_yet, first=first)
    _keep(module, handle)
    trained = [each for each in module.parameters() if each.requires_grad]
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

    entry = _entry_of(module, options)
    partitioned = entry is not None and _is_partitioned(module)
    return (step if partitioned else compiled_call(type(module), mode, options, first_seconds, packs_in_eager)), entry


def _keep(module: nn.Module, handle: Handle) -> Handle:
    _HANDLES[module] = weakref.ref(handle)
    _leave_alone(*module.modules())
    module._compiled_call_impl = partial(_armed_call, handle, module)
    return handle
