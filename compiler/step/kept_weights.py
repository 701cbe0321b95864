"""Weights from which a deferred output is computed later, with the values that they had when it was deferred.

[Note: weights that an optimizer changes]
Users read or log `out.logits` after `optimizer.step()`, when the weights behind the logits have changed. So one hook,
before each step of each optimizer, copies those weights once for all deferred outputs that live and were not computed:
what is read afterwards is what eager would have shown. A loop that drops its outputs, such as the Trainer's, copies
nothing. Pads need all weights: up to `MAX_COPIED_BYTES` are copied for all steps together, and beyond that a look at
pads after the optimizer's step is an error. A weight that changes in any other way (in place under `no_grad`, through
`.data`) is noticed by its version and by a sample of its values. The use then raises `DeferredError` and never gives
other numbers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from deepytorch.compiler.step.past import Past
from deepytorch.errors import DeferredError
from deepytorch.passes.samples import same_bits, sample
from deepytorch.patches import listen

MAX_COPIED_BYTES = 1 << 30

ADVICE = (
    "read it before changing the weights, or compile with torch.compile(..., options={'defer_outputs': False}), "
    "which computes it in every step"
)


class Kept:
    """Tensors from which an output will be computed later, with the values they had when this object was made."""

    __slots__ = ("__weakref__", "_name", "dependencies")

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        _listen()
        self.dependencies, self._name = [*map(_Dependency, tensors)], name
        _KEPT.add(self)

    def usable(self) -> list[torch.Tensor]:
        """Return the tensors, or copies of those that an optimizer has changed since.

        Raises `DeferredError` where one was changed otherwise.
        """
        return [dependency.usable(self._name) for dependency in self.dependencies]

    def release(self) -> None:
        """Keep the tensors no longer."""
        self.dependencies = []
        _KEPT.discard(self)


class _Dependency:
    """A tensor from which a deferred value is made, with a version and a sample that tell whether it has changed."""

    __slots__ = ("sample", "snapshot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = -1 if tensor.is_inference() else tensor._version
        self.sample = sample(tensor)
        self.snapshot: torch.Tensor | None = None

    def usable(self, name: str) -> torch.Tensor:
        """Return the tensor with the values it had; raise `DeferredError` if they are gone."""
        if self.snapshot is None:
            if version_of(self.tensor) != self.version:
                raise self._changed(name, "changed in place")
            if self.tensor.numel() and _storage_key(self.tensor) == 0:
                raise self._changed(name, "freed")
            source = self.tensor
        else:
            source = self.snapshot.detach()  # others share the snapshot: they must not get the flag and hook set below
            if self.tensor.requires_grad:
                source.requires_grad_().register_hook(functools.partial(_refuse_gradient, name, self.tensor.shape))
        if self.sample is not None and not same_bits(self.sample, sample(source)):
            raise self._changed(name, "written through .data, or by a kernel that does not tell autograd,")
        return source

    def keep(self, copies: dict[int, torch.Tensor]) -> None:
        """Copy the tensor, which is about to change. copies: existing ones, by the tensor's id; a new one is added."""
        if version_of(self.tensor) != self.version:
            return  # too late: a use of the deferred value will raise
        if id(self.tensor) not in copies:
            copies[id(self.tensor)] = self.tensor.detach().clone()
        self.snapshot = copies[id(self.tensor)]

    def _changed(self, name: str, how: str) -> DeferredError:
        return DeferredError(
            f"{name!r} is computed at its first use, and a weight of shape {tuple(self.tensor.shape)} that it is made "
            f"of was {how} since the step; expected it unchanged, or changed by an Optimizer.step only: {ADVICE}"
        )


_KEPT: weakref.WeakSet[Kept] = weakref.WeakSet()
_PASTS: weakref.WeakSet[Past] = weakref.WeakSet()  # not run again, and held by outputs that somebody holds


def keep_for(past: Past) -> None:
    """Have the weights among a past's inputs copied before an optimizer changes them."""
    _listen()
    _PASTS.add(past)


def forget(past: Past) -> None:
    """Have nothing more copied for a past."""
    _PASTS.discard(past)


def _listen() -> None:
    listen(register_optimizer_step_pre_hook, _before_step, "keep weights that outputs need", _keep_all)


def _keep_all() -> None:
    """Copy all weights that are still needed: no later optimizer step will be announced."""
    copies: dict[int, torch.Tensor] = {}
    for dependency in _without_snapshot():
        dependency.keep(copies)
    _keep_for_pasts({id(each) for past in _PASTS for each in past.inputs if _is_weight(each)}, copies)


@torch.compiler.disable(reason="weights that deferred outputs still need are copied before a step")
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Copy, once for all holders, the weights that `optimizer` is about to change and that somebody still needs."""
    endangered = _without_snapshot()
    if not endangered and not _PASTS:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = {id(parameter) for parameter in parameters}
    copies: dict[int, torch.Tensor] = {}
    if endangered:
        storages = {_storage_key(parameter) for parameter in parameters} - {0}  # flat parameters alias the model's own
        for dependency in endangered:
            if id(dependency.tensor) in identities or _storage_key(dependency.tensor) in storages:
                dependency.keep(copies)
    _keep_for_pasts(identities, copies)


def _keep_for_pasts(changed: set[int], copies: dict[int, torch.Tensor]) -> None:
    """Copy weights that are about to change for the pasts that need them, up to `MAX_COPIED_BYTES`."""
    pasts = list(_PASTS)
    left = MAX_COPIED_BYTES - sum(past.copied_bytes for past in pasts)
    for past in pasts:
        takes = past.bytes_of(changed, copies)
        if takes <= left:
            past.keep(changed, copies)
            left -= takes


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad)


def _without_snapshot() -> list[_Dependency]:
    return [dependency for kept in _KEPT for dependency in kept.dependencies if dependency.snapshot is None]


def _storage_key(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind `tensor`; 0 where it has none of its own (freed, sharded, meta)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of writes into `tensor`; -1 where none is kept."""
    return -1 if tensor.is_inference() else tensor._version


def _refuse_gradient(name: str, shape: torch.Size, gradient: torch.Tensor) -> None:
    raise DeferredError(
        f"a gradient of {name!r} would have to reach a weight of shape {tuple(shape)} that an optimizer has changed "
        "since the step; expected backward before Optimizer.step (eager raises here too): call backward first or detach"
    )
