"""An output that is computed when it is first used: `outputs.logits` stays alive at no cost, and still works.

A packed step needs no logits for its loss, but hands its user an object in their place. That object is a tensor whose
shape, dtype and device are known and whose numbers are made at the first operation that looks at them, from what its
closure holds.

[Note: weights that change in between]
Users read `out.logits` after `optimizer.step()`, when the weights that they are made of are others. Before every step
of every optimizer a global hook clones those weights for the deferred tensors that live and were not computed: what is
read afterwards is what eager would have shown. A weight that changes in any other way (in place under `no_grad`,
through `.data`) is noticed, by its version and by a sample of its values, and the use raises `DeferredError`: an error,
never other numbers.

[Note: where gradients go]
Gradients reach whatever the closure read, as in eager. A gradient that would have to reach a weight that has changed
since raises, as in eager ("modified by an inplace operation"). The loss of the same step was not made from the deferred
value, so `d loss / d logits` does not exist: `retain_grad()` on a deferred tensor logs so, once. Its `grad_fn` is a
node of its own, there to be looked at (DeepSpeed hooks every output that has one); uses go through the value's history.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from deepytorch.errors import DeferredError
from deepytorch.log import once
from deepytorch.passes.samples import same_bits, sample

Compute = Callable[[list[torch.Tensor]], torch.Tensor]

_ADVICE = (
    "read it before changing the weights, or compile with torch.compile(..., options={'defer_outputs': False}), "
    "which computes it in every step"
)


def defer(
    shape: Sequence[int],
    compute: Compute,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    requires_grad: bool = False,
    name: str = "output",
    depends_on: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """A tensor of `shape`, `dtype` and `device` that `compute` makes when its values are first used, once.

    `compute(dependencies)` is given `depends_on` as it was now: the same tensors, or copies where an optimizer has
    stepped since. It must read no other tensor that can change, draw no random numbers, and return a tensor of the
    described shape, dtype and device. It runs under the grad mode, the inference mode and the autocast state of this
    call, and is released after that.
    `requires_grad` holds only while gradients are enabled, as for the result of any operation.

    Raises (at the use, not here) `DeferredError` when a dependency has changed other than by `Optimizer.step`.
    """
    _hook_optimizers()
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        device = torch.empty(0, device=device).device  # "cuda" is the current one of them
    requires_grad = requires_grad and torch.is_grad_enabled()
    pending = _Pending(tuple(shape), dtype, device, requires_grad, name, compute, depends_on)
    if depends_on:
        _PENDING.add(pending)
    return _wrap(pending)


def is_deferred(tensor: object) -> bool:
    """Whether `tensor` is a deferred one that was not computed yet."""
    return isinstance(tensor, _Deferred) and tensor._pending.value is None


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a deferred one, computed now if it has to be; any other tensor as it is."""
    return tensor._pending.compute() if isinstance(tensor, _Deferred) else tensor


class _Dependency:
    """A tensor that a deferred value is made of, and how to tell that it is still what it was."""

    __slots__ = ("sample", "snapshot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = _version(tensor)
        self.sample = sample(tensor)
        self.snapshot: torch.Tensor | None = None

    def usable(self, name: str) -> torch.Tensor:
        """The tensor with the values it had, or `DeferredError`."""
        if self.snapshot is None:
            if _version(self.tensor) != self.version:
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
            f"of was {how} since the step; expected it unchanged, or changed by an Optimizer.step only: {_ADVICE}"
        )


class _Pending:
    """What a deferred tensor stands for: how to compute it, and its value once that was done.

    The tensor and its autograd node own it and it owns neither, so it dies with the tensor.
    """

    __slots__ = (
        "__weakref__", "_compute", "autocast", "dependencies", "device", "dtype", "hooks",
        "inference", "name", "requires_grad", "shape", "value",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        compute: Compute,
        depends_on: Sequence[torch.Tensor],
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.requires_grad = requires_grad
        self.name = name
        self._compute: Compute | None = compute
        self.dependencies = [_Dependency(tensor) for tensor in depends_on]
        self.inference = torch.is_inference_mode_enabled()
        kind = device.type
        self.autocast = (
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            if torch.amp.is_autocast_available(kind)
            else None
        )
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.value: torch.Tensor | None = None

    @torch.compiler.disable(reason="a deferred output is computed at its first use")
    def compute(self) -> torch.Tensor:
        """The value, computed at the first call."""
        if self.value is not None:
            return self.value
        assert self._compute is not None
        dependencies = [dependency.usable(self.name) for dependency in self.dependencies]
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(self.inference))
            modes.enter_context(torch.set_grad_enabled(self.requires_grad))
            if self.autocast is not None and (self.autocast[0] or torch.is_autocast_enabled(self.device.type)):
                enabled, dtype = self.autocast
                # without its cache: a cast of a weight cached elsewhere may be one made without gradients
                modes.enter_context(torch.autocast(self.device.type, dtype, enabled, cache_enabled=False))
            value = self._compute(dependencies)
        self._check(value)
        if self.hooks and value.requires_grad:
            value.register_hook(functools.partial(_run_hooks, self.hooks))
        self.value, self._compute, self.dependencies = value, None, []
        _PENDING.discard(self)
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

    def derive(
        self, dtype: torch.dtype, requires_grad: bool, operation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`operation` on this value, deferred too; it is computed with this value and then cheap."""
        return _wrap(
            _Pending(self.shape, dtype, self.device, requires_grad, self.name, lambda _: operation(self.compute()), ())
        )


class _Deferred(torch.Tensor):
    """The tensor that a user holds. What is done with it is done with the computed value, but for `_DESCRIPTION`."""

    _pending: _Pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, _Deferred) and tensor._pending.value is None:
            if func in _DESCRIPTION:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            pending = tensor._pending
            if func in _LAZY and not kwargs:
                answer = _LAZY[func](tensor, pending, *args[1:])
                if answer is not None:
                    return answer
        args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.compute(), (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only what bypasses __torch_function__ comes here, below autograd: C++ callers, DisableTorchFunctionSubclass.
        # Autograd has seen the wrapper's own node by now, so the value is what counts, not its history.
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch.is_grad_enabled() and _writes_to_deferred(func, args):
            raise DeferredError(
                f"{func} changes a deferred output in place where its history cannot follow; expected a call through "
                "Python's torch functions: compile with torch.compile(..., options={'defer_outputs': False})"
            )
        with torch.overrides.enable_reentrant_dispatch():
            args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.compute(), (args, kwargs))
        return func(*args, **kwargs)


class _Source(torch.autograd.Function):
    """The autograd node of a deferred tensor, for gradients of uses that Python does not see (`Function.apply`).

    It runs the value's backward inside its own. One backward pass that comes both through it and through an ordinary
    use reaches the value's graph twice, and autograd refuses that, aloud.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a loss beside it, through a node that both share, has no gradient for it
        ctx.pending = pending
        return _bare(pending)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is None:
            return None, None
        value = ctx.pending.compute()
        if value.requires_grad:
            torch.autograd.backward(value, gradient)
        return None, None


_ANCHOR = torch.empty((), requires_grad=True)  # what the node of a deferred tensor hangs on; it never gets a gradient


def _wrap(pending: _Pending) -> torch.Tensor:
    if not pending.requires_grad:
        return _bare(pending)
    with torch.enable_grad():
        return _Source.apply(_ANCHOR, pending)


def _bare(pending: _Pending) -> torch.Tensor:
    tensor = torch.Tensor._make_wrapper_subclass(_Deferred, pending.shape, dtype=pending.dtype, device=pending.device)
    tensor._pending = pending
    return tensor


def _writes_to_deferred(func: Any, args: tuple) -> bool:
    return any(
        isinstance(value, _Deferred) and value._pending.requires_grad
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _float(tensor: torch.Tensor, pending: _Pending) -> torch.Tensor:
    # accelerate casts every half-precision output so
    if pending.dtype == torch.float32:
        return tensor
    return pending.derive(torch.float32, pending.requires_grad and torch.is_grad_enabled(), torch.Tensor.float)


def _detach(tensor: torch.Tensor, pending: _Pending) -> torch.Tensor:
    return pending.derive(pending.dtype, False, torch.Tensor.detach)


def _register_hook(tensor: torch.Tensor, pending: _Pending, hook: Any) -> RemovableHandle | None:
    return pending.add_hook(hook) if pending.requires_grad else None


def _retain_grad(tensor: torch.Tensor, pending: _Pending) -> None:
    once(
        logging.WARNING,
        "retain_grad() on the deferred output %r: the loss of its step was not computed from it, so only gradients of "
        "what you compute from it yourself will show in .grad; options={'defer_outputs': False} gives the usual way",
        pending.name,
    )


# Answered without computing; an answer of None means: compute after all.
_LAZY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.float: _float,
    torch.Tensor.detach: _detach,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
}

# What a deferred tensor knows of itself. Strides are not among them: nobody promised that the value is contiguous.
_DESCRIPTION = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "itemsize", "nbytes",
        "is_cuda", "is_cpu",
        "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xla",
        "is_mtia",
    )
) | frozenset(
    (
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
        torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed,
        torch.Tensor.get_device, torch.Tensor.__len__, torch.Tensor.__hash__,
        torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed,
    )
)  # fmt: skip

_PENDING: weakref.WeakSet[_Pending] = weakref.WeakSet()  # not computed, with dependencies


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_snapshot_before_step)


@torch.compiler.disable(reason="weights that deferred outputs still need are cloned before a step")
def _snapshot_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clone, once for all deferred tensors, what `optimizer` is about to change and they still need."""
    endangered = [
        dependency for pending in _PENDING for dependency in pending.dependencies if dependency.snapshot is None
    ]
    if not endangered:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = {id(parameter) for parameter in parameters}
    storages = {_storage_key(parameter) for parameter in parameters} - {0}  # flat parameters alias the model's own
    clones: dict[int, torch.Tensor] = {}
    for dependency in endangered:
        tensor = dependency.tensor
        if id(tensor) not in identities and _storage_key(tensor) not in storages:
            continue
        if _version(tensor) != dependency.version:
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


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _refuse_gradient(name: str, shape: torch.Size, gradient: torch.Tensor) -> None:
    raise DeferredError(
        f"a gradient of {name!r} would have to reach a weight of shape {tuple(shape)} that an optimizer has changed "
        "since the step; expected backward before Optimizer.step (eager raises here too): call backward first or detach"
    )


def _run_hooks(hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        if replaced is not None:
            gradient = replaced
    return gradient
