"""A value that is computed when somebody needs it, and the tensor that stands for it until then.

[Note: where gradients go]
Gradients reach whatever the closure read, as in eager. A gradient that would have to reach a weight that has changed
since raises, as in eager ("modified by an inplace operation"). The loss of the same step was not made from the deferred
value, so `d loss / d logits` does not exist: `retain_grad()` on a deferred tensor logs so, once. Its `grad_fn` is a
node of its own, there to be looked at (DeepSpeed hooks every output that has one); uses go through the value's history.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.kept_weights import Kept, version_of
from deepytorch.compiler.step.outputs.tokens import Tokens
from deepytorch.compiler.step.past import Modes
from deepytorch.errors import DeferredError
from deepytorch.torch_internals import make_wrapper_subclass

Compute = Callable[[list[torch.Tensor]], torch.Tensor]


class Pending:
    """What a deferred tensor stands for: how to compute it, and its value once that was done.

    The tensor and its autograd node own it and it owns neither, so it dies with the tensor.
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
        "kept",
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
        kept: Kept | None = None,
        family: Family | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.requires_grad = requires_grad
        self.name = name
        self._compute: Compute | None = compute
        self.kept = kept
        self._modes = Modes(grad=requires_grad)
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.value: torch.Tensor | None = None
        self.make_tokens: Callable[[], Tokens | None] | None = None
        self.events: RegionEvents | None = None
        self.profiled = self.whole = False
        self.family = Family() if family is None else family
        self.memory = object()  # what stands for the memory that it would share with its views
        self.sources: tuple[Pending, ...] = ()  # what it was computed from
        self.version = -1  # of the value when it was computed

    def tokens(self) -> Tokens | None:
        """Its tokens, if it has them and nobody needed more."""
        return self.make_tokens() if self.make_tokens is not None and self.value is None else None

    def asked(self, function: Any) -> torch.Tensor:
        """The value, for a function that takes all of it."""
        if self.value is None and self.events is not None:
            if function in _OF_GRAPHS:
                self.events.asked_for_graph(self.name, function)
            elif not self.whole:
                self.events.looked_at_pads(self.name, function)
        return self.compute()

    def comes_from(self, other: Pending) -> bool:
        """Whether it shares memory with `other` or was computed from it."""
        return self.memory is other.memory or any(each is other or each.comes_from(other) for each in self.sources)

    def moved(self) -> Pending:
        """Another one for the same value, which this one is about to be no more."""
        assert self._compute is not None
        before = Pending(self.shape, self.dtype, self.device, self.requires_grad, self.name, self._compute, self.kept)
        before._modes, before.sources = self._modes, self.sources
        return before

    def become(self, tokens: Tokens, compute: Compute) -> None:
        """Another value, by a write in place."""
        self.make_tokens, self._compute, self.kept = (lambda: tokens), compute, None

    @torch.compiler.disable(reason="a deferred output is computed at its first use")
    def compute(self) -> torch.Tensor:
        """The value, computed at the first call."""
        if self.value is not None:
            return self.value
        assert self._compute is not None
        dependencies = [] if self.kept is None else self.kept.usable()
        with self._modes:
            value = self._compute(dependencies)
        self._check(value)
        if self.hooks and value.requires_grad:
            value.register_hook(functools.partial(_run_hooks, self.hooks))
        self.value, self._compute, self.make_tokens, self.sources = value, None, None, ()
        self.version = version_of(value)
        if self.kept is not None:
            self.kept.release()
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
        """`Tensor.register_hook` on what is not there yet (FSDP2 hooks every output that requires grad)."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle


# Uses that ask for a tensor's place between the weights and the loss.
_OF_GRAPHS = frozenset((torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad))


class Family:
    """The deferred tensors of one step, in the order of their making, as long as somebody holds them."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(weakref.ref(tensor))

    def others(self, tensor: torch.Tensor) -> list[Pending]:
        """Of all that live, are not computed, and are not `tensor`."""
        found = [held for each in self._tensors if (held := each()) is not None and held is not tensor]
        return [held._pending for held in found if held._pending.value is None]  # type: ignore[attr-defined]


class PendingTensor(torch.Tensor):
    """What stands for a value in a user's hands. A subclass says what is done with it."""

    _pending: Pending

    @classmethod
    def of(cls, pending: Pending, anchor: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor that stands for `pending`. anchor: the value, if it is there."""
        if pending.requires_grad:
            with torch.enable_grad():
                tensor = _Source.apply(_ANCHOR if anchor is None else anchor, pending, cls)
        else:
            tensor = cls.bare(pending)
        pending.family.add(tensor)
        return tensor

    @classmethod
    def bare(cls, pending: Pending) -> torch.Tensor:
        """The same without an autograd node."""
        tensor = make_wrapper_subclass(cls, pending.shape, dtype=pending.dtype, device=pending.device)
        tensor._pending = pending
        return tensor


class _Source(torch.autograd.Function):
    """The autograd node of a deferred tensor, for gradients of uses that Python does not see (`Function.apply`).

    It runs the value's backward inside its own. One backward pass that comes both through it and through an ordinary
    use reaches the value's graph twice, and autograd refuses that, aloud.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, pending: Pending, kind: type[PendingTensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a loss beside it, through a node that both share, has no gradient for it
        ctx.pending, ctx.is_value = pending, anchor is not _ANCHOR
        return kind.bare(pending)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None or ctx.is_value:  # then the anchor is the value itself
            return gradient, None, None
        value = ctx.pending.compute()
        if value.requires_grad:
            torch.autograd.backward(value, gradient)
        return None, None, None


_ANCHOR = torch.empty((), requires_grad=True)  # what the node of a deferred tensor hangs on; it never gets a gradient


def _run_hooks(hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        if replaced is not None:
            gradient = replaced
    return gradient
