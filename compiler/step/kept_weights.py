"""Weights of past calls: copied right before an optimizer changes them, and given as they were.

[Note: weights that an optimizer changes]
Users read or log `out.logits` after `optimizer.step()`, when the weights behind the logits have changed. So one hook,
before each step of each optimizer, copies those weights once for all deferred outputs that live and were not computed:
what is read afterwards is what eager would have shown. A loop that drops its outputs, such as the Trainer's, copies
nothing. Pads need all weights: up to `MAX_COPIED_BYTES` are copied for all calls together, and beyond that a look at
pads after the optimizer's step is an error. A weight that changes in any other way (in place under `no_grad`, through
`.data`) is noticed by its version and by a sample of its values. The use then raises `DeferredError` and never gives
other numbers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from deepytorch.compiler.step.past import Past, version_of
from deepytorch.errors import DeferredError
from deepytorch.passes.samples import Sampler
from deepytorch.patches import Patch, listen

MAX_COPIED_BYTES = 1 << 30


class Holder(Protocol):
    """Something that may still read weights of a past call.

    places: those of the weights, which are copied in any case; None for all, which are copied up to a limit.
    """

    past: Past

    @property
    def places(self) -> Collection[int] | None: ...


class PastWeights:
    """Some weights of a past call, from which one output will be computed.

    Args:
        past: The call.
        places: The places of the weights among its inputs.
        others: The places of the inputs that must not have changed: those of the batch, and buffers that are read.
        name: The name of the output.
        sampler: Samples the weights.
    """

    __slots__ = ("__weakref__", "_name", "_others", "_sampler", "_samples", "given", "past", "places")

    def __init__(self, past: Past, places: Sequence[int], others: Collection[int], name: str, sampler: Sampler) -> None:
        self.past, self.places, self._others, self._name, self._sampler = past, places, others, name, sampler
        self.given = list(map(past.inputs.__getitem__, places))
        self._samples = sampler.take(self.given)
        keep_for(self)

    def then(self) -> list[torch.Tensor]:
        """Return the weights as they were at the call: themselves, or copies of those that an optimizer has changed.

        Raises `DeferredError` if the batch or a buffer was overwritten, or if anything but an optimizer has changed a
        weight.
        """
        past = self.past
        if any(place in self._others and place not in past.copies for place in past.changed()):
            raise DeferredError(
                f"{self._name} is computed from a batch or a buffer that was overwritten since. Read it before the "
                "next batch is copied in, or compile with options={'defer_outputs': False}."
            )
        found = [self._weight(place) for place in self.places]
        for weight in self._sampler.changed(found, self._samples, ()):
            raise self._changed(weight, "written through .data, or by a kernel that does not tell autograd,")
        return found

    def _weight(self, place: int) -> torch.Tensor:
        past, given = self.past, self.past.inputs[place]
        if place in past.kept_places:
            return as_then(past, place)
        if version_of(given) != past.versions.get(place, -1):
            raise self._changed(given, "changed in place")
        if given.numel() and _storage_of(given) == 0:
            raise self._changed(given, "freed")
        return given

    def _changed(self, weight: torch.Tensor, how: str) -> DeferredError:
        return DeferredError(
            f"{self._name!r} is computed at its first use, and a weight of shape {tuple(weight.shape)} that it is made "
            f"of was {how} since the step; expected it unchanged, or changed by an Optimizer.step only: read it before "
            "changing the weights, or compile with torch.compile(..., options={'defer_outputs': False}), which "
            "computes it in every step"
        )


def as_then(past: Past, place: int) -> torch.Tensor:
    """Return a weight that an optimizer has changed as it was at the call. Its gradient goes to the weight."""
    return _AsThen.apply(past.inputs[place], past.copies[place])  # type: ignore[no-any-return]


class _AsThen(torch.autograd.Function):
    """Puts the values of an earlier time in a weight's place.

    Eager keeps these values for the backward where it needs them, and raises if they have changed: this gives the
    gradient that they belong to.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
        return then.view_as(then)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


# ---------------------------------------------------------------------- before an optimizer's step

_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook: Patch | None = None  # on all optimizers, once it is asked for


def keep_for(holder: Holder) -> None:
    """Have the weights that a holder may read copied before an optimizer changes them, as long as the holder lives."""
    if _hook is None or not _hook.applied:
        listen_to_steps()
    _HOLDERS.add(holder)


def listen_to_steps() -> None:
    """Have torch announce the steps of all optimizers. To be called before a closure makes the first holder, too."""
    global _hook
    _hook = listen(register_optimizer_step_pre_hook, _before_step, "keep weights that outputs need", _keep_all)


def forget(holder: Holder) -> None:
    """Have nothing more copied for a holder."""
    _HOLDERS.discard(holder)


def _keep_all() -> None:
    """Copy all weights that are still needed: no later optimizer step will be announced."""
    copies: dict[int, torch.Tensor] = {}
    for holder in list(_HOLDERS):
        holder.past.copy_inputs(holder.places or (), copies)
    _keep_for_pads({id(each) for holder in _HOLDERS for each in holder.past.inputs if _is_weight(each)}, copies)


@torch.compiler.disable(reason="weights that deferred outputs still need are copied before a step")
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Copy, once for all holders, the weights that `optimizer` is about to change and that somebody still needs.

    If `Optimizer.step` has a closure, return arguments with one that does so behind each of its evaluations.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):  # the calls that it makes come before the weights change, and behind this hook
        kept = functools.partial(_then_keep, closure, optimizer)
        return ((args[0], kept, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": kept})
    _keep(optimizer)
    return None


def _then_keep(closure: Callable[[], Any], optimizer: Optimizer) -> Any:
    found = closure()
    _keep(optimizer)
    return found


def _keep(optimizer: Optimizer) -> None:
    holders = list(_HOLDERS)
    if not holders:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    changed = {id(parameter) for parameter in parameters}
    storages = {_storage_of(parameter) for parameter in parameters} - {0}  # flat parameters alias the model's own
    copies: dict[int, torch.Tensor] = {}
    for holder in holders:
        inputs = holder.past.inputs
        due = [p for p in holder.places or () if id(inputs[p]) in changed or _storage_of(inputs[p]) in storages]
        holder.past.copy_inputs(due, copies)
    _keep_for_pads(changed, copies)


def _keep_for_pads(changed: set[int], copies: dict[int, torch.Tensor]) -> None:
    """Copy weights that are about to change for looks at pads, up to `MAX_COPIED_BYTES`."""
    pasts = [holder.past for holder in _HOLDERS if holder.places is None]
    left = MAX_COPIED_BYTES - sum(past.copied_bytes for past in pasts)
    for past in pasts:
        due = [place for place, each in enumerate(past.inputs) if id(each) in changed and place in past.versions]
        takes = past.bytes_of(due, copies)
        if takes <= left:
            before = len(past.kept_places)
            past.copy_inputs(due, copies)
            # shared copies count for each past: any of these may be the last to hold them
            past.copied_bytes += sum(past.inputs[p].nbytes for p in due) if len(past.kept_places) > before else 0
            left -= takes


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad)


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind `tensor`; 0 where it has none of its own (freed, sharded, meta)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
