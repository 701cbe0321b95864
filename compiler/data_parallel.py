"""A DistributedDataParallel module around what is compiled: its gradients are reduced by us, and it is told so.

DDP keeps everything else: its flags (`no_sync`), the broadcast of buffers, the names of its parameters. Its reducer is
replaced by one that does nothing but say when a backward is to reduce, so that DDP's own hooks send nothing.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from deepytorch.comm.gradients.bucket_memory import strides
from deepytorch.comm.gradients.buckets import BucketPlan, Member, expected_arrivals, group_link, plan_buckets
from deepytorch.comm.gradients.comm_hooks import CommHook
from deepytorch.comm.gradients.reducer import REDUCERS, GradientReducer
from deepytorch.comm.group.groups import group_of
from deepytorch.compiler.change_over import ChangeOver
from deepytorch.errors import ConfigError, GradientError
from deepytorch.log import logger, once
from deepytorch.passes.ops.reduce import EXPECTED
from deepytorch.patches import forget, patch
from deepytorch.torch_internals import disable_dynamo, get_active_ddp_module, get_process_group_store

_NAMES = (f"ddp{number}" for number in itertools.count(1))  # alike on all ranks, which wrap their modules in one order
_ATTRIBUTE = "_deepytorch_gradients"
_PROSPECT = "_deepytorch_prospect"
# What compiled backwards still know by name, after DDP has got its gradients back.
_RELEASED: weakref.WeakKeyDictionary[nn.Module, list[GradientReducer]] = weakref.WeakKeyDictionary()


@dataclass
class Members:
    """The parameters of one DDP module, whose gradients a graph hands to the reducer of that name."""

    name: str
    numbers: dict[int, int]  # id of a parameter -> member of the plan

    def members(self, inputs: Any) -> tuple[tuple[int, int], ...]:
        """(place among the inputs of a graph, member of the plan) for each parameter of the module."""
        return tuple(
            (place, self.numbers[id(value)]) for place, value in enumerate(inputs) if id(value) in self.numbers
        )


@dataclass
class Adopted(Members):
    """One DDP module whose gradients we reduce."""

    reducer: GradientReducer


class _Silent:
    """Stands in for DDP's reducer: gradients are not its business any more, everything else is as before."""

    def __init__(self, ddp: Any, ours: GradientReducer) -> None:
        self.theirs, self._ddp, self._ours = ddp.reducer, weakref.ref(ddp), ours

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """DDP says so after a forward whose backward is to be reduced."""
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable:
            raise GradientError(
                "DistributedDataParallel.join was entered after deepytorch had taken over the gradients; expected "
                "batches on every rank: compile with options={'reduce_gradients': False} to use join"
            )
        self._ours.arm()

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        """A static graph's first backward: nothing is delayed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def active() -> Any | None:
    """The DDP module in whose forward this code runs, or None."""
    return get_active_ddp_module()  # type: ignore[attr-defined]


def adopt(ddp: Any) -> Adopted | str:
    """Take over the gradients of a DDP module, once; or the reason why they stay with DDP."""
    known = getattr(ddp, _ATTRIBUTE, None)
    if known is None:
        known = _why_not(ddp) or _adopted(ddp)
        object.__setattr__(ddp, _ATTRIBUTE, known)
        if isinstance(known, str):
            once(logging.WARNING, "gradients are reduced by DistributedDataParallel itself: %s", known)
    return known


def _why_not(ddp: Any) -> str | None:
    hooks = getattr(ddp, "_comm_hooks", None) or []
    if len(hooks) > 1:
        return "several communication hooks were registered, which are DDP's to call"
    if not hooks and ddp._get_ddp_logging_data().get("comm_hook"):
        return "a built-in communication hook was registered, which is DDP's to call"
    if ddp._join_config.enable:
        return "DistributedDataParallel.join is in use"
    if getattr(ddp, "_use_python_reducer", False):
        return "optimize_ddp='python_reducer' was asked for"
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        return "some gradients are delayed (delay_all_reduce_named_params)"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision is in use"
    if any(parameter.requires_grad and parameter.layout != torch.strided for parameter in ddp.module.parameters()):
        return "a parameter is not dense"
    if any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse for each in ddp.module.modules()):
        return "an embedding has sparse gradients"
    return None


@dataclass
class Prospect(Members):
    """One DDP module whose gradients are to be ours once all ranks are ready, see [Note: Change-over]."""

    change_over: ChangeOver


def prospect(ddp: Any) -> Members | str:
    """Prepare to take over the gradients of a DDP module; or the reason why they stay with DDP.

    To be called in the same forward on all ranks, the first one.
    """
    known = getattr(ddp, _ATTRIBUTE, None) or getattr(ddp, _PROSPECT, None)
    if known is None:
        reason = _why_not(ddp)
        if reason is not None:
            return adopt(ddp)
        known = _prospect(ddp)
        object.__setattr__(ddp, _PROSPECT, known)
    return known


def _prospect(ddp: Any) -> Prospect:
    this, name = weakref.ref(ddp), next(_NAMES)
    group = ddp.process_group
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    change_over = ChangeOver(name, get_process_group_store(group), rank, size, lambda: adopt(this()))
    parameters = [parameter for _, parameter in _parameters(ddp)]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    EXPECTED[name] = {number: layout(parameter) for number, parameter in enumerate(parameters)}
    weakref.finalize(ddp, EXPECTED.pop, name, None).atexit = False

    def apply() -> None:
        found = this()
        if found is not None:
            found.reducer = _Watched(found.reducer, change_over)

    def undo() -> None:
        found = this()
        forget(where)
        if found is not None:
            object.__delattr__(found, _PROSPECT)
            if isinstance(found.reducer, _Watched):
                found.reducer = found.reducer.theirs

    where = f"DistributedDataParallel.reducer of {name} (watched)"
    weakref.finalize(ddp, forget, where).atexit = False
    patch(where, "take its gradients over in the same step on all ranks", apply, undo, always=True)
    return Prospect(name, numbers, change_over)


def layout(parameter: torch.Tensor) -> tuple[Any, Any, torch.dtype, torch.device]:
    """Shape, stride, type and device of a parameter's gradient."""
    return parameter.shape, strides(parameter), parameter.dtype, parameter.device


class _Watched:
    """Stands before DDP's reducer until its gradients are ours: sees every forward."""

    def __init__(self, theirs: Any, change_over: ChangeOver) -> None:
        self.theirs, self._change_over = theirs, change_over

    @disable_dynamo
    def _rebuild_buckets(self) -> bool:
        """What DDP calls in every forward whose backward may follow."""
        self._change_over.forward()
        return False if self._change_over.is_over else bool(self.theirs._rebuild_buckets())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def preview(ddp: Any) -> dict[str, Any]:
    """What would be done with the gradients of a DDP module, as JSON, for people to read. Nothing is taken over."""
    reason = _why_not(ddp)
    return {"declined": reason} if reason else _plan(_parameters(ddp), ddp).to_json()


def _parameters(ddp: Any) -> list[tuple[str, nn.Parameter]]:
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def _adopted(ddp: Any) -> Adopted:
    found = _parameters(ddp)
    plan = _plan(found, ddp)
    prepared = getattr(ddp, _PROSPECT, None)
    name = next(_NAMES) if prepared is None else prepared.name
    may_be_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
    hooks = getattr(ddp, "_comm_hooks", None) or []
    reducer = GradientReducer(
        name,
        found,
        plan,
        ddp.process_group,
        link=group_link(ddp.process_group),
        bucket_bytes=_bucket_bytes(ddp),
        may_be_unused=may_be_unused,
        hook=CommHook(*hooks[0]) if hooks else None,
        timeout=_timeout(ddp.process_group),
    )
    reducer.attach()
    REDUCERS[name] = reducer
    where, this = f"DistributedDataParallel.reducer of {name}", weakref.ref(ddp)
    weakref.finalize(ddp, forget, where).atexit = False
    patch(where, "reduce its gradients in the compiled backward", *_take_over(this, reducer, where), always=True)
    logger.info("%s: %d gradients leave in %d buckets", name, len(plan.members), len(plan.buckets))
    return Adopted(name, {id(parameter): number for number, (_, parameter) in enumerate(found)}, reducer)


def _take_over(
    this: Callable[[], Any], ours: GradientReducer, where: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What puts our reducer into a DDP module, and what takes it out again."""
    before: dict[str, Any] = {}
    names = ("find_unused_parameters", "_static_graph_delay_allreduce_enqueued")

    def apply() -> None:
        ddp = this()
        before.update({name: getattr(ddp, name, None) for name in ("reducer", *names)})
        ddp.reducer = _Silent(ddp, ours)
        ddp._check_comm_hook = _too_late
        # DDP would pass every output through a node of its own, which copies it: deferred logits would be computed.
        ddp.find_unused_parameters, ddp._static_graph_delay_allreduce_enqueued = False, True

    def undo() -> None:
        ddp = this()
        forget(where)  # the next region that is compiled in it takes its gradients over anew
        ours.release()
        if ddp is None:
            return
        _RELEASED.setdefault(ddp, []).append(ours)
        for name, value in before.items():
            setattr(ddp, name, value)
        del ddp._check_comm_hook
        object.__delattr__(ddp, _ATTRIBUTE)

    return apply, undo


def _too_late(hook: Any) -> None:
    """What DDP calls when a communication hook is registered."""
    raise GradientError(
        "register_comm_hook was called after deepytorch had taken over the gradients; expected it before the first step"
    )


def _timeout(group: Any) -> timedelta:
    """How long ranks wait for each other in this group."""
    try:
        return group_of(group).timeout
    except ConfigError:
        options = getattr(group._get_backend(group._device_types[0]), "options", None)
        return getattr(options, "_timeout", timedelta(minutes=30))


def _plan(parameters: list[tuple[str, nn.Parameter]], ddp: Any) -> BucketPlan:
    """For a start: as if the backward took as long as its communication, and the last parameters came first."""
    members = [
        Member(name, str(each.dtype).removeprefix("torch."), each.numel(), each.element_size())
        for name, each in parameters
    ]
    link = group_link(ddp.process_group)
    backward_us = link.time_us(sum(member.num_bytes for member in members))
    arrivals = expected_arrivals(members, backward_us)
    return plan_buckets(members, arrivals, link, backward_us, bucket_bytes=_bucket_bytes(ddp))


def _bucket_bytes(ddp: Any) -> int | None:
    """What `bucket_cap_mb` says; None where it was not given."""
    return None if getattr(ddp, "bucket_bytes_cap_default", True) else ddp.bucket_bytes_cap
