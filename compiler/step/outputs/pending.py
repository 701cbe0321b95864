"""The pending value, which is computed when somebody needs it, and the tensor that stands for it until then.

[Note: where gradients go]
Gradients reach every tensor that the closure read, as in eager. A gradient that would have to reach a weight that has
changed since raises, as in eager ("modified by an inplace operation"). The loss of the same step was not made from the
deferred value, so `d loss / d logits` does not exist: `retain_grad()` on a deferred tensor logs this once. A deferred
tensor's `grad_fn` is a node that can be looked at (DeepSpeed hooks every output that has one); uses of the tensor go
through the value's history. An autograd function of a script gets the value; only functions of frameworks, which hand
every output on, get the deferred tensor itself (`deferred._PASS_ON`).
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.outputs.tokens import Tokens
from deepytorch.compiler.step.past import VALUES_ALONE, Modes, version_of
from deepytorch.errors import DeferredError
from deepytorch.torch_internals import keeps_graph_of_this_backward, make_wrapper_subclass

Compute = Callable[[], torch.Tensor]


class Pending:
    """The value behind a deferred tensor: the function that computes it, and the value once it was computed.

    The tensor and its autograd node own this object, and it owns neither, so it dies with the tensor.
    """

    __slots__ = (
        "__weakref__",
        "_compute",
        "_modes",
        "device",
        "dtype",
        "events",
        "family",
        "hooks",
        "make_tokens",
        "memory",
        "name",
        "profiled",
        "requires_grad",
        "shape",
        "sources",
        "value",
        "version",
        "whole",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        compute: Compute,
        family: Family | None = None,
        modes: Modes | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.requires_grad = requires_grad
        self.name = name
        self._compute: Compute | None = compute
        self._modes = Modes(grad=requires_grad) if modes is None else modes
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.value: torch.Tensor | None = None
        self.make_tokens: Callable[[], Tokens | None] | None = None
        self.events: RegionEvents | None = None
        self.profiled = self.whole = False
        self.family = Family() if family is None else family
        self.memory = object()  # a token for the memory that the value would share with its views
        self.sources: tuple[Pending, ...] = ()  # the pending values that this one is computed from
        self.version = -1  # of the value when it was computed

    def tokens(self) -> Tokens | None:
        """Return the value's tokens; None if it has none, or if the padded value was computed."""
        return self.make_tokens() if self.make_tokens is not None and self.value is None else None

    def asked(self, function: Any) -> torch.Tensor:
        """Return the value for a function that needs all of it, and note this use.

        Where the function takes numbers from it alone, for a log, the value has no gradients and is not kept: the loss
        is still made from the tokens.
        """
        if self.value is None and self.events is not None:
            if function in _OF_GRAPHS:
                self.events.asked_for_graph(self.name, function)
            elif not self.whole and function in _NUMBERS and self._is_detached_here():
                if self.events.looked_at_values(self.name, function) and not self._is_of_profile():
                    return self._without_gradients()
            elif not self.whole:
                self.events.looked_at_pads(self.name, function)
        return self.compute()

    def _is_detached_here(self) -> bool:
        """Return whether the value comes from a call that trains, and no gradient goes back from this use of it."""
        return self._is_of_training() and not (self.requires_grad and torch.is_grad_enabled())

    def _is_of_training(self) -> bool:
        """Return whether the value, or one that it is computed from, requires gradients."""
        return self.requires_grad or any(each._is_of_training() for each in self.sources)

    def _is_of_profile(self) -> bool:
        """Return whether eager has computed the value already, or one that it is computed from."""
        return self.profiled or any(each._is_of_profile() for each in self.sources)

    @torch.compiler.disable(reason="a deferred output is computed at its first use")
    def _without_gradients(self) -> torch.Tensor:
        """Return the value without gradients, which is not kept: callers must not write to it, nor hand it on."""
        before = VALUES_ALONE.set(True)
        try:
            return self.compute()
        finally:
            VALUES_ALONE.reset(before)

    def comes_from(self, other: Pending) -> bool:
        """Return whether this value shares memory with `other` or was computed from it."""
        return self.memory is other.memory or any(each is other or each.comes_from(other) for each in self.sources)

    def moved(self) -> Pending:
        """Return another object for the present value, before this object becomes another value (`become`)."""
        assert self._compute is not None
        before = Pending(self.shape, self.dtype, self.device, self.requires_grad, self.name, self._compute)
        before._modes, before.sources = self._modes, self.sources
        return before

    def become(self, tokens: Tokens, compute: Compute) -> None:
        """Stand for another value from now on, which a write in place makes."""
        self.make_tokens, self._compute = (lambda: tokens), compute

    @torch.compiler.disable(reason="a deferred output is computed at its first use")
    def compute(self) -> torch.Tensor:
        """Return the value, computed at the first call; under `VALUES_ALONE` without gradients, and not kept."""
        if self.value is not None:
            return self.value
        assert self._compute is not None
        if VALUES_ALONE.get():
            with self._modes.entered(), torch.no_grad():
                return self._compute()
        with self._modes.entered():
            value = self._compute()
        self._check(value)
        if self.hooks and value.requires_grad:
            value.register_hook(functools.partial(_run_hooks, self.hooks))
        self.value, self._compute, self.make_tokens, self.sources = value, None, None, ()
        self.version = version_of(value)
        return value

    def _check(self, value: torch.Tensor) -> None:
        described = (self.shape, self.dtype, self.device)
        found = (tuple(value.shape), value.dtype, value.device)
        if found != described:
            raise DeferredError(
                f"{self.name!r} was announced as {described} and computed as {found}; this is an error of deepytorch: "
                "please report it, and compile with torch.compile(..., options={'defer_outputs': False}) until it is "
                "mended"
            )

    def add_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """Register a gradient hook on a value not computed yet (FSDP2 hooks every output that requires grad)."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle


# Uses that need a tensor's place in autograd's graph, between the weights and the loss.
_OF_GRAPHS = frozenset((torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad))
# Uses that give numbers in memory of their own, and leave the tensor as it is.
_NUMBERS = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("mean", "sum", "std", "var", "amax", "amin", "norm", "any", "all")
)


class Family:
    """The deferred tensors of one step, in the order of their making, as long as somebody holds them."""

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def is_held(self) -> bool:
        """Return whether somebody holds one of the tensors whose value is not computed, or is a profiled one."""
        return any(each.value is None or each.profiled for each in self._living())

    def compute(self) -> None:
        """Compute all values that somebody holds."""
        for each in self._living():
            each.compute()

    def _living(self) -> list[Pending]:
        found = [held for each in self.tensors if (held := each()) is not None]
        return [held._pending for held in found]  # type: ignore[attr-defined]

    def others(self, tensor: torch.Tensor) -> list[Pending]:
        """Return the pending values of all other tensors that live and are not computed."""
        found = [held for each in self.tensors if (held := each()) is not None and held is not tensor]
        return [held._pending for held in found if held._pending.value is None]  # type: ignore[attr-defined]


class PendingTensor(torch.Tensor):
    """The tensor that stands for a pending value. A subclass defines its operations."""

    _pending: Pending

    @classmethod
    def all_of(cls, pendings: Sequence[Pending], anchor: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        """Return the tensors that stand for pending values of one step, which have one autograd node together.

        A node for each of a decoder's cached keys and values would cost the host 0.4 ms in a model of 12 layers.
        anchor: the value of the only one, if it is computed already.
        """
        if pendings and pendings[0].requires_grad:
            with torch.enable_grad():
                tensors = _Source.apply(_ANCHOR if anchor is None else anchor, pendings, cls)
        else:
            tensors = cls.bare(pendings)
        for pending, tensor in zip(pendings, tensors, strict=True):
            pending.family.tensors.append(weakref.ref(tensor))
        return tensors

    @classmethod
    def bare(cls, pendings: Sequence[Pending]) -> list[torch.Tensor]:
        """Return the tensors that stand for pending values, without an autograd node."""
        tensors = []
        for pending in pendings:
            tensor = make_wrapper_subclass(cls, pending.shape, dtype=pending.dtype, device=pending.device)
            tensor._pending = pending
            tensors.append(tensor)
        return tensors


class _Source(torch.autograd.Function):
    """The autograd node of deferred tensors, for gradients of uses that Python does not see (`Function.apply`).

    The node runs the values' backward inside its own. A backward pass that comes both through this node and through an
    ordinary use reaches the values' graph twice; autograd raises then.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, pendings: Sequence[Pending], kind: type[PendingTensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # another loss, through a node that both share, has no gradient for this one
        ctx.pendings, ctx.is_value = pendings, anchor is not _ANCHOR
        return tuple(kind.bare(pendings))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if ctx.is_value:  # then the anchor is the value itself
            return gradients[0], None, None
        came = [
            (pending.compute(), each) for pending, each in zip(ctx.pendings, gradients, strict=True) if each is not None
        ]
        came = [(value, each) for value, each in came if value.requires_grad]
        if came:
            torch.autograd.backward(
                [value for value, _ in came],
                [each for _, each in came],
                retain_graph=keeps_graph_of_this_backward(),
                create_graph=torch.is_grad_enabled(),
            )
        return None, None, None


_ANCHOR = torch.empty((), requires_grad=True)  # the input of deferred tensors' nodes; it never gets a gradient


def _run_hooks(hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        if replaced is not None:
            gradient = replaced
    return gradient
