"""Weights that something is computed from later, with the values that they had when it was put off.

[Note: weights that change in between]
Users read `out.logits` after `optimizer.step()`, when the weights that they are made of are others. Before every step
of every optimizer a global hook clones those weights for the deferred tensors that live and were not computed: what is
read afterwards is what eager would have shown. A weight that changes in any other way (in place under `no_grad`,
through `.data`) is noticed, by its version and by a sample of its values, and the use raises `DeferredError`: an error,
never other numbers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from deepytorch.errors import DeferredError
from deepytorch.passes.samples import same_bits, sample
from deepytorch.patches import listen

ADVICE = (
    "read it before changing the weights, or compile with torch.compile(..., options={'defer_outputs': False}), "
    "which computes it in every step"
)


class Kept:
    """Tensors that something will be computed from later, with the values they had when this was made."""

    __slots__ = ("__weakref__", "_name", "dependencies")

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        listen(register_optimizer_step_pre_hook, _snapshot_before_step, "keep weights that outputs need", _keep_all)
        self.dependencies, self._name = [_Dependency(tensor) for tensor in tensors], name
        _KEPT.add(self)

    def usable(self) -> list[torch.Tensor]:
        """The tensors, or copies where an optimizer has stepped since; `DeferredError` where they changed otherwise."""
        return [dependency.usable(self._name) for dependency in self.dependencies]

    def release(self) -> None:
        """They are needed no more."""
        self.dependencies = []
        _KEPT.discard(self)


class _Dependency:
    """A tensor that a deferred value is made of, and how to tell that it is still what it was."""

    __slots__ = ("sample", "snapshot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.sample = sample(tensor)
        self.snapshot: torch.Tensor | None = None

    def usable(self, name: str) -> torch.Tensor:
        """The tensor with the values it had, or `DeferredError`."""
        if self.snapshot is None:
            if version_of(self.tensor) != self.version:
                raise self._changed(name, "changed in place")
            if self.tensor.numel() and _storage_key(self.tensor) == 0:
                raise self._changed(name, "freed")
            source = self.tensor
        else:
            source = self.snapshot.detach()  # a snapshot is shared: what is set on it below must not be
            if self.tensor.requires_grad:
                source.requires_grad_().register_hook(functools.partial(_refuse_gradient, name, self.tensor.shape))
        if self.sample is not None and not same_bits(self.sample, sample(source)):
            raise self._changed(name, "written through .data, or by a kernel that does not tell autograd,")
        return source

    def _changed(self, name: str, how: str) -> DeferredError:
        return DeferredError(
            f"{name!r} is computed at its first use, and a weight of shape {tuple(self.tensor.shape)} that it is made "
            f"of was {how} since the step; expected it unchanged, or changed by an Optimizer.step only: {ADVICE}"
        )


_KEPT: weakref.WeakSet[Kept] = weakref.WeakSet()


def _keep_all() -> None:
    """No step will be announced any more: clone whatever deferred tensors still need."""
    _snapshot(_without_snapshot())


def _without_snapshot() -> list[_Dependency]:
    return [dependency for kept in _KEPT for dependency in kept.dependencies if dependency.snapshot is None]


@torch.compiler.disable(reason="weights that deferred outputs still need are cloned before a step")
def _snapshot_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clone, once for all deferred tensors, what `optimizer` is about to change and they still need."""
    endangered = _without_snapshot()
    if not endangered:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = {id(parameter) for parameter in parameters}
    storages = {_storage_key(parameter) for parameter in parameters} - {0}  # flat parameters alias the model's own
    _snapshot(
        dependency
        for dependency in endangered
        if id(dependency.tensor) in identities or _storage_key(dependency.tensor) in storages
    )


def _snapshot(dependencies: Iterable[_Dependency]) -> None:
    clones: dict[int, torch.Tensor] = {}
    for dependency in dependencies:
        tensor = dependency.tensor
        if version_of(tensor) != dependency.version:
            continue  # too late: its use will say so
        if id(tensor) not in clones:
            clones[id(tensor)] = tensor.detach().clone()
        dependency.snapshot = clones[id(tensor)]


def _storage_key(tensor: torch.Tensor) -> int:
    """The address of the memory behind `tensor`; 0 where it has none of its own (freed, sharded, meta)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """The count of writes into `tensor`; -1 where none is kept."""
    return -1 if tensor.is_inference() else tensor._version


def _refuse_gradient(name: str, shape: torch.Size, gradient: torch.Tensor) -> None:
    raise DeferredError(
        f"a gradient of {name!r} would have to reach a weight of shape {tuple(shape)} that an optimizer has changed "
        "since the step; expected backward before Optimizer.step (eager raises here too): call backward first or detach"
    )
