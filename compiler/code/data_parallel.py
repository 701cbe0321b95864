"""The DistributedDataParallel module around a compiled model: our reducer reduces its gradients in place of DDP's.

DDP keeps everything else: its flags (`no_sync`), the broadcast of buffers, the names of its parameters, and its choice
of the parameters to reduce, frozen or not, which it made when it was built. From the first forward on, an object of
ours stands before DDP's reducer and sees which backwards are to be reduced. Once all ranks have agreed (see [Note:
Takeover]), DDP's reducer gets no more calls, so that its own hooks send nothing.

[Note: Wrapped again]
A script may wrap a model once more, as a second Trainer does. The code that was compiled under the first module goes
on: modules with the same list of parameters have one name for their gradients, and the reducer of that name is the one
of the module whose forward ran last. A module that was not there at the compilation is adopted in its first forward
(`meet`).

DDP's reducers of several such modules may all average the gradients of one backward, to the same values; ours must not
be among them, since another one's average may be under way in the memory that it reads. So gradients are ours until a
forward ends that DDP is to reduce, of another module with some of the parameters: they go back to DDP then, for good.
DDP's own method says so, on every rank, whatever runs inside of the forward. A takeover does the same to other modules.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.comm.gradients import registry
from deepytorch.comm.gradients.arrival_times import finish
from deepytorch.comm.gradients.autograd_leaves import on_accumulated
from deepytorch.comm.gradients.bucket_memory import strides
from deepytorch.comm.gradients.buckets import BucketPlan, Member, expected_arrivals, group_link, plan_buckets
from deepytorch.comm.gradients.comm_hooks import CommHook, only_averages
from deepytorch.comm.gradients.reducer import GradientReducer
from deepytorch.compiler.code.takeover import Takeover
from deepytorch.ddp_modules import copies_outputs, place_of
from deepytorch.log import logger, once
from deepytorch.patches import forget, patch, replace
from deepytorch.torch_internals import disable_dynamo, get_active_ddp_module, get_process_group_store

_TAKEOVER = "_deepytorch_takeover"
_ATTRIBUTE = "_deepytorch_gradients"
_FLAGS = ("find_unused_parameters", "_static_graph_delay_allreduce_enqueued")


@dataclass
class Members:
    """The parameters of DDP modules, whose gradients a graph hands to the reducer called `name`."""

    name: str
    numbers: dict[int, int]  # id of a parameter -> member of the plan

    def members(self, inputs: Any) -> tuple[tuple[int, int], ...]:
        """Return (place among the inputs of a graph, member of the plan) for each parameter of the module."""
        return tuple(
            (place, self.numbers[id(value)]) for place, value in enumerate(inputs) if id(value) in self.numbers
        )


@dataclass
class DdpGradients(Members):
    """One DDP module whose gradients our reducer has, or gets once all ranks are ready, see [Note: Takeover].

    declined: the reason for which DDP has the gradients again.
    """

    reducer: GradientReducer
    takeover: Takeover
    declined: str | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module has gradients of its own


class _Between:
    """The object before DDP's reducer: it sees the reducer's calls, and withholds them after the takeover."""

    def __init__(self, ddp: Any, takeover: Takeover) -> None:
        self.theirs, self._this, self.takeover = ddp.reducer, weakref.ref(ddp), takeover
        self.ours: DdpGradients | None = None
        self.flags: dict[str, Any] = {}  # of the module, as the script gave them
        # Of these calls only the first in each backward counts.
        self._hooks = [on_accumulated(each, lambda _: takeover.accumulated()) for _, each in _parameters(ddp)]

    @property
    def ddp(self) -> Any | None:
        """Return the module, unless it is gone."""
        return self._this()

    @disable_dynamo
    def prepare_for_forward(self) -> None:
        """Pass on a call of DDP's, made in every forward whose backward is to be reduced."""
        if self._joins():
            self._leave()
        if self.ours is None:
            self.theirs.prepare_for_forward()

    @disable_dynamo
    def _rebuild_buckets(self) -> bool:
        """Pass on a call of DDP's, which begins a forward with gradients on, and by a joined rank instead.

        The takeover happens here.
        """
        if self._joins():
            self._leave()
        self.takeover.forward_begins()
        return False if self.ours is not None else bool(self.theirs._rebuild_buckets())

    @disable_dynamo
    def prepare_for_backward(self, outputs: Any) -> None:
        """Pass on a call of DDP's, made after every forward whose backward is to be reduced."""
        if self.ours is not None:
            registry.arm(self.ours.name, self.ours.reducer)
        else:
            self.takeover.forward_ended()
            self.theirs.prepare_for_backward(outputs)

    @disable_dynamo
    def _delay_all_reduce(self) -> None:
        """Pass on a call of DDP's, made after a static graph's first backward."""
        if self.ours is None:
            self.theirs._delay_all_reduce()

    def take_over(self, ddp: Any, ours: DdpGradients) -> None:
        """Hand gradients to our reducer, from this forward on."""
        self._stop_counting()
        self.ours = ours
        ours.reducer.take_over()
        # DDP would pass every output through a node of its own, which copies it: deferred logits would be computed.
        self.flags = {each: getattr(ddp, each, None) for each in _FLAGS}
        ddp.find_unused_parameters, ddp._static_graph_delay_allreduce_enqueued = False, True

    def give_back(self) -> None:
        """Hand gradients back to DDP for good, except for those of a backward that is awaited."""
        self.takeover.stop()
        self._stop_counting()
        if self.ours is not None:
            self.ours.reducer.release()
        ddp = self.ddp
        if ddp is not None:
            ddp.reducer = self.theirs
            for name, value in self.flags.items():
                setattr(ddp, name, value)

    def _joins(self) -> bool:
        ddp = self.ddp
        return ddp is not None and self.takeover.lasts and bool(ddp._join_config.enable)

    def _leave(self) -> None:
        if self.ours is not None:
            self.ours.reducer.disarm()  # a forward begins, and DDP's reducer gets the call
        _give_back(self.ddp, "DistributedDataParallel.join is in use")
        self.ours = None  # the call under way goes to DDP's reducer, too

    def _stop_counting(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


_OURS: weakref.WeakSet[_Between] = weakref.WeakSet()  # those of modules whose gradients were taken over


def active() -> Any | None:
    """Return the DDP module in whose forward this code runs, or None."""
    return get_active_ddp_module()  # type: ignore[attr-defined]


def takeover_of(ddp: Any) -> Takeover:
    """Return the takeover of a DDP module's gradients. To be called first in the module's first forward."""
    found = vars(ddp).get(_TAKEOVER)
    if found is None:
        found = _watch(ddp)
        object.__setattr__(ddp, _TAKEOVER, found)
    return found  # type: ignore[no-any-return]


def adopt(ddp: Any) -> DdpGradients | str:
    """Return `gradients_of(ddp)`, and note that this rank is ready."""
    found = gradients_of(ddp)
    if isinstance(found, DdpGradients):
        found.takeover.ready()
    return found


def meet(ddp: Any) -> None:
    """Note the DDP module in whose forward a region runs, see [Note: Wrapped again].

    A module that copies its outputs is ready from the first forward on: what it copies cannot be deferred, so that
    nothing is packed before the takeover.
    """
    if _ATTRIBUTE not in vars(ddp) or copies_outputs(ddp):
        adopt(ddp)


def gradients_of(ddp: Any) -> DdpGradients | str:
    """Return the gradients of a DDP module, which are ours once all ranks are ready, or the reason against it."""
    takeover = takeover_of(ddp)
    known = vars(ddp).get(_ATTRIBUTE)
    if known is None:
        known = _make_gradients(ddp, takeover)
        object.__setattr__(ddp, _ATTRIBUTE, known)
    return known if isinstance(known, str) else known.declined or known


def delays_some(ddp: Any) -> bool:
    """Return whether DDP delays the reduction of some gradients to another one's backward, which has to come later."""
    return bool(getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None))


def _why_not(ddp: Any) -> str | None:
    if delays_some(ddp):
        return "some gradients are delayed (delay_all_reduce_named_params)"
    hooks = getattr(ddp, "_comm_hooks", None) or []
    if any(not only_averages(hook, state, ddp.process_group) for hook, state in hooks) or len(hooks) > 1:
        return "a communication hook was registered, which goes by DDP's buckets"
    if not hooks and ddp._get_ddp_logging_data().get("comm_hook"):
        return "a built-in communication hook was registered, which is DDP's to call"
    if ddp._join_config.enable:
        return "DistributedDataParallel.join is in use"
    if getattr(ddp, "_use_python_reducer", False):
        return "optimize_ddp='python_reducer' was asked for"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision is in use"
    parameters = [parameter for _, parameter in _parameters(ddp)]
    if any(parameter.layout != torch.strided for parameter in parameters):
        return "a parameter is not dense"
    if len({parameter.device for parameter in parameters}) > 1:
        return "its parameters lie on several devices"
    if any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse for each in ddp.module.modules()):
        return "an embedding has sparse gradients"
    return None


def _watch(ddp: Any) -> Takeover:
    this, group, place = weakref.ref(ddp), ddp.process_group, place_of(ddp)
    device = next(ddp.module.parameters()).device
    takeover = Takeover(
        place or f"a copy at {id(ddp)}",
        get_process_group_store(group),
        dist.get_rank(group),
        dist.get_world_size(group),
        lambda: _take_over(this()),
        lambda: finish(device),
    )
    reason = _why_not(ddp) or (None if place else "it is a copy of another module, which other ranks may not have")
    if reason is not None:
        takeover.stop()
        object.__setattr__(ddp, _ATTRIBUTE, reason)
        _say_why(reason)
        return takeover
    if ddp._get_ddp_logging_data().get("iteration"):  # forwards so far: ranks would not count alike
        takeover.failed("did not compile its DistributedDataParallel module in the first forward")

    def apply() -> None:
        found = this()
        if found is not None:
            found.reducer = _Between(found, takeover)

    where = _where(takeover)
    weakref.finalize(ddp, forget, where).atexit = False
    patch(where, "take its gradients over on all ranks together", apply, lambda: _give_back(this()), always=True)
    for method in ("register_comm_hook", "_register_builtin_comm_hook"):
        replace(
            nn.parallel.DistributedDataParallel, method, _registers, "give gradients back to DDP's hooks", always=True
        )
    return takeover


def _where(takeover: Takeover) -> str:
    return f"DistributedDataParallel.reducer of {takeover.name}"


def _take_over(ddp: Any) -> None:
    _give_up_for(ddp)
    ddp.reducer.take_over(ddp, vars(ddp)[_ATTRIBUTE])
    _OURS.add(ddp.reducer)
    for method, wrapped, what in (
        ("_post_forward", _ends_forward, "give gradients back to DDP where another module reduces them"),
        ("__getstate__", _gives_state, "give copies of a module the flags that the script gave it"),
    ):
        replace(nn.parallel.DistributedDataParallel, method, wrapped, what, always=True)


def _give_up_for(ddp: Any) -> None:
    """Give gradients of other modules with parameters of this one back to DDP, see [Note: Wrapped again]."""
    given_up = registry.give_up(ddp._module_parameters)
    for each in [each for each in _OURS if each.ours is not None and each.ours.reducer in given_up]:
        _give_back(each.ddp)


def _give_back(ddp: Any, reason: str | None = None) -> None:
    """Hand everything back to DDP. reason: for the log; None if the user asked for it."""
    if ddp is None or not isinstance(ddp.reducer, _Between):
        return
    between, known = ddp.reducer, vars(ddp).get(_ATTRIBUTE)
    forget(_where(between.takeover))
    between.give_back()
    declined = reason or "they were given back"
    if isinstance(known, DdpGradients):
        known.declined = declined
    else:
        object.__setattr__(ddp, _ATTRIBUTE, declined)
    if reason is not None:
        _say_why(reason)


def _say_why(reason: str) -> None:
    once(logging.WARNING, "gradients are reduced by DistributedDataParallel itself: %s", reason)


def _registers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that registers a communication hook: DDP's reducer is put back first, as only it takes the hook."""

    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        _give_back(self, "a communication hook was registered after the first forward")
        return original(self, *args, **kwargs)

    return register


def _ends_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method with which DDP ends a forward, see [Note: Wrapped again]."""

    @disable_dynamo
    def post_forward(self: Any, output: Any) -> Any:
        is_ours = isinstance(self.reducer, _Between) and self.reducer.ours is not None
        if not is_ours and self.require_backward_grad_sync and torch.is_grad_enabled():
            _give_up_for(self)
        return original(self, output)

    return post_forward


def _gives_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that gives copies and pickles their state: they do not have our reducer."""

    def state(self: Any) -> Any:
        return original(self) | (self.reducer.flags if isinstance(self.reducer, _Between) else {})

    return state


def layout(parameter: torch.Tensor) -> tuple[Any, Any, torch.dtype, torch.device]:
    """Return shape, stride, dtype and device of a parameter's gradient."""
    return parameter.shape, strides(parameter), parameter.dtype, parameter.device


def preview(ddp: Any) -> dict[str, Any]:
    """Return the plan for the gradients of a DDP module, as JSON, for people to read. Nothing is taken over."""
    reason = _why_not(ddp)
    return {"declined": reason} if reason else _plan(_parameters(ddp), ddp).to_json()


def _parameters(ddp: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that DDP reduces, with their names.

    DDP chose them when it was made, whatever is frozen, ignored, added or shared since then.
    """
    reduced = [each for bucket in ddp.reducer._get_zeros_like_grad_buckets() for each in bucket.parameters()]
    names = {id(each): name for name, each in reversed(list(ddp.module.named_parameters()))}
    order = {number: place for place, number in enumerate(reversed(names))}
    reduced.sort(key=lambda each: order.get(id(each), len(order)))
    return [(names.get(id(each), "one that has left the module"), each) for each in reduced]


def _make_gradients(ddp: Any, takeover: Takeover) -> DdpGradients:
    found = _parameters(ddp)
    plan = _plan(found, ddp)
    may_be_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
    hooks = getattr(ddp, "_comm_hooks", None) or []
    reducer = GradientReducer(
        takeover.name,
        found,
        plan,
        ddp.process_group,
        link=group_link(ddp.process_group),
        bucket_bytes=_bucket_bytes(ddp),
        may_be_unused=may_be_unused,
        hook=CommHook(*hooks[0]) if hooks else None,
    )
    takeover.settings = f"{plan.digest()} {may_be_unused}"
    logger.info("%s: %d gradients are to leave in %d buckets", reducer.name, len(plan.members), len(plan.buckets))
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(found)}
    return DdpGradients(registry.register(reducer), numbers, reducer, takeover)


def _plan(parameters: list[tuple[str, nn.Parameter]], ddp: Any) -> BucketPlan:
    """Return a first plan: as if the backward took as long as its communication, with the last parameters first."""
    members = [
        Member(name, str(each.dtype).removeprefix("torch."), each.numel(), each.element_size())
        for name, each in parameters
    ]
    link = group_link(ddp.process_group)
    backward_us = link.time_us(sum(member.num_bytes for member in members))
    arrivals = expected_arrivals(members, backward_us)
    return plan_buckets(members, arrivals, link, backward_us, bucket_bytes=_bucket_bytes(ddp))


def _bucket_bytes(ddp: Any) -> int | None:
    """Return the size that `bucket_cap_mb` asks for; None if it was not given."""
    return None if getattr(ddp, "bucket_bytes_cap_default", True) else ddp.bucket_bytes_cap
