"""The modules that hold given parameters, found by a walk over all living objects.

An optimizer knows its parameters, but not the modules that they belong to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from deepytorch.patches import listen

MODELS: list[Callable[[nn.Module], bool]] = []  # return whether a module can be packed at entry, if it is frozen
_MODULES: _Modules | None = None  # as the last walk found them; None if they have changed since


def holders_of(trained: Sequence[torch.Tensor]) -> list[nn.Module]:
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


def models_beside(module: nn.Module) -> list[nn.Module]:
    """Return the outermost of `MODELS` that neither hold a trained parameter of `module` nor are held by a holder."""
    if not MODELS:
        return []
    holders = holders_of([each for each in module.parameters() if each.requires_grad])
    return [] if _MODULES is None else _MODULES.models_beside(holders)


def _forget_modules(*_: Any) -> None:
    global _MODULES
    _MODULES = None


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


def holds(outer: nn.Module, inner: nn.Module) -> bool:
    """Return whether `inner` is `outer` or one of its submodules."""
    return any(each is inner for each in outer.modules())


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a single layer of torch's, which has nothing to gain by itself.

    A script that calls an embedding, and then the model with what it gave, trains the model.
    """
    return not module._modules and type(module).__module__.startswith("torch.nn.")
