"""Weights of past calls, copied right before an optimizer changes them.

[Note: weights that an optimizer changes]
Users read or log `out.logits` after `optimizer.step()`, when the weights behind the logits have changed. So one hook,
before each step of each optimizer, copies those weights once for the pasts of all deferred outputs that live and were
not computed: what is read afterwards is what eager would have shown. A loop that drops its outputs, such as the
Trainer's, copies nothing. Weights of a deferred epilogue (`Past.needed`) are always copied. Pads need all weights: up
to `MAX_COPIED_BYTES` are copied for all calls together, and beyond that a look at pads after the optimizer's step is an
error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from deepytorch.compiler.step.past import Past
from deepytorch.patches import listen

MAX_COPIED_BYTES = 1 << 30

_PASTS: weakref.WeakSet[Past] = weakref.WeakSet()  # not run again, and held by outputs that somebody holds


def keep_for(past: Past) -> None:
    """Have the weights among a past's inputs copied before an optimizer changes them."""
    listen(register_optimizer_step_pre_hook, _before_step, "keep weights that outputs need", _keep_all)
    _PASTS.add(past)


def forget(past: Past) -> None:
    """Have nothing more copied for a past."""
    _PASTS.discard(past)


def _keep_all() -> None:
    """Copy all weights that are still needed: no later optimizer step will be announced."""
    copies: dict[int, torch.Tensor] = {}
    for past in list(_PASTS):
        past.keep(sorted(past.needed), copies)
    _keep_for_pads({id(each) for past in _PASTS for each in past.inputs if _is_weight(each)}, copies)


@torch.compiler.disable(reason="weights that deferred outputs still need are copied before a step")
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Copy, once for all pasts, the weights that `optimizer` is about to change and that somebody still needs."""
    if not _PASTS:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    changed = {id(parameter) for parameter in parameters}
    storages: set[int] | None = None
    copies: dict[int, torch.Tensor] = {}
    for past in list(_PASTS):
        if past.needed and storages is None:  # flat parameters alias the model's own
            storages = {storage_of(parameter) for parameter in parameters} - {0}
        due = [
            place
            for place in sorted(past.needed)
            if id(past.inputs[place]) in changed or storage_of(past.inputs[place]) in (storages or ())
        ]
        past.keep(due, copies)
    _keep_for_pads(changed, copies)


def _keep_for_pads(changed: set[int], copies: dict[int, torch.Tensor]) -> None:
    """Copy weights that are about to change for a look at pads, up to `MAX_COPIED_BYTES`."""
    pasts = [past for past in _PASTS if past.may_be_replayed]
    left = MAX_COPIED_BYTES - sum(past.copied_bytes for past in pasts)
    for past in pasts:
        due = [place for place, each in enumerate(past.inputs) if id(each) in changed and place in past.versions]
        takes = past.bytes_of(due, copies)
        if takes <= left:
            past.keep(due, copies)
            past.copied_bytes += takes
            left -= takes


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind `tensor`; 0 where it has none of its own (freed, sharded, meta)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
