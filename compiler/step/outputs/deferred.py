"""The deferred output (`outputs.logits`, as ever): it is computed at its first use, or only its tokens are.

A packed step needs no logits for its loss, and does not compute the values at pads. In their place its user gets a
tensor whose shape, dtype and device are known. Its numbers are made, from tensors that its closures hold, at the first
operation that looks at them. Uses in which no pad has a part (`pad_safe`) run on the tokens, and give deferred tensors
again. Any other use gets the padded value, with eager's numbers at pads too; the padded value stands in for the
deferred tensor from then on.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepytorch.compiler.step.events import RegionEvents, is_users
from deepytorch.compiler.step.outputs import pad_safe
from deepytorch.compiler.step.outputs.pending import Compute, Family, Pending, PendingTensor
from deepytorch.compiler.step.outputs.token_uses import compute_others, may_write, on_tokens
from deepytorch.compiler.step.outputs.tokens import Tokens
from deepytorch.compiler.step.past import Modes
from deepytorch.ddp_modules import copies_outputs
from deepytorch.errors import DeferredError
from deepytorch.log import once
from deepytorch.patches import Patch, replace
from deepytorch.torch_internals import (
    DisableTorchFunctionSubclass,
    functorch_utils,
    get_active_ddp_module,
    tree_map_only,
)


def defer(
    shape: Sequence[int],
    compute: Compute,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    requires_grad: bool = False,
    name: str = "output",
    tokens: Callable[[], Tokens | None] | None = None,
    events: RegionEvents | None = None,
    family: Family | None = None,
    profiled: bool = False,
    whole: bool = False,
    modes: Modes | None = None,
) -> torch.Tensor:
    """Return a tensor of `shape`, `dtype` and `device` that `compute` makes once, when its values are first used.

    `compute` must give the same value at any time or raise `DeferredError`, draw no random numbers, and return a tensor
    of the described shape, dtype and device. It runs under the grad mode, the inference mode and the autocast state of
    this call, and is released after that.

    Args:
        shape: The shape of the padded value.
        compute: Makes the padded value.
        dtype: The value's dtype.
        device: The value's device.
        requires_grad: Whether the value requires gradients; only while gradients are enabled, as for any operation.
        name: The output's name in messages.
        tokens: Gives the value's tokens, for uses that need no more.
        events: Notes every use.
        family: All deferred outputs of the step.
        profiled: Whether `compute` gives a tensor of the graph that eager has made already.
        whole: Whether the value has no pads that cost anything.
        modes: Those of this call with the grad mode `requires_grad`, if they are known.
    """
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        device = torch.empty(0, device=device).device  # "cuda" means the current device
    requires_grad = requires_grad and torch.is_grad_enabled()
    pending = Pending(tuple(map(int, shape)), dtype, device, requires_grad, name, compute, family, modes)
    pending.make_tokens, pending.events, pending.profiled, pending.whole = tokens, events, profiled, whole
    (deferred,) = _Deferred.all_of((pending,), compute() if profiled else None)
    return computed(deferred) if must_be_plain() else deferred


def defer_together(pendings: Sequence[Pending]) -> Sequence[torch.Tensor]:
    """Return the tensors that `defer` would give for these pending values of one step, with one autograd node."""
    tensors = _Deferred.all_of(pendings)
    return [computed(each) for each in tensors] if must_be_plain() else tensors


def see_autograd_functions() -> None:
    """Have deferred outputs computed before a script's `torch.autograd.Function` is applied to them.

    To be called before a step makes some.

    `Function.apply` is no torch function: `_Deferred` does not see it. The value's graph would then begin inside of the
    function, where gradients are off, and `torch.autograd.grad` would not reach the weights.
    """
    global _seen
    if _seen is None or not _seen.applied:
        called = functorch_utils.unwrap_dead_wrappers  # by `Function.apply`, with its arguments
        why = "compute outputs for autograd functions"
        _seen = replace(functorch_utils, called.__name__, _computing, why, always=True)


_seen: Patch | None = None  # the change that `see_autograd_functions` makes


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> Any:
        if _Deferred in map(type, args):
            function = sys._getframe(1).f_locals.get("cls")  # of `Function.apply`
            if not getattr(function, "__module__", "").startswith(_PASS_ON):
                args = tuple([each._pending.asked(function) if type(each) is _Deferred else each for each in args])
        return original(args)

    return unwrap_dead_wrappers


# Their functions hand every output on as it is, to be told of its gradient: they do not look at it.
_PASS_ON = ("torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.")


def must_be_plain() -> bool:
    """Return whether DDP passes the outputs of the forward that runs through a node of its own."""
    ddp = get_active_ddp_module()
    return ddp is not None and copies_outputs(ddp)


def is_deferred(tensor: object) -> bool:
    """Return whether `tensor` is a deferred tensor that was not computed yet."""
    return isinstance(tensor, _Deferred) and tensor._pending.value is None


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a deferred one, computed now if it has to be; return any other tensor as it is."""
    return tensor._pending.compute() if isinstance(tensor, _Deferred) else tensor


class _Deferred(PendingTensor):
    """The deferred tensor that a user holds. Operations go to the computed value, except for `_DESCRIPTION`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, _Deferred) and tensor._pending.value is None:
            if func in _DESCRIPTION:
                with DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            pending = tensor._pending
            if func in _LAZY and not kwargs:
                answer = _LAZY[func](tensor, pending, *args[1:])
                if answer is not None:
                    return answer
        if not torch.compiler.is_dynamo_compiling():
            result = on_tokens(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
            if isinstance(tensor, _Deferred) and may_write(func, kwargs or {}):
                compute_others(func, tensor)
        args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.asked(func), (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only calls that bypass __torch_function__ come here, below autograd: from C++, DisableTorchFunctionSubclass.
        # Autograd has seen the wrapper's own node by now, so only the value counts, not its history.
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch.is_grad_enabled() and _writes_to_deferred(func, args):
            raise DeferredError(
                f"{func} changes a deferred output in place where its history cannot follow; expected a call through "
                "Python's torch functions: compile with torch.compile(..., options={'defer_outputs': False})"
            )
        with torch.overrides.enable_reentrant_dispatch():
            args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.asked(func), (args, kwargs))
        return func(*args, **kwargs)


def _derive(
    source: Pending, dtype: torch.dtype, requires_grad: bool, operation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the deferred result of `operation` on a deferred value. The operation is cheap once the value is there."""
    derived = Pending(
        source.shape, dtype, source.device, requires_grad, source.name, lambda: operation(source.compute())
    )
    derived.events, derived.family, derived.whole = source.events, source.family, source.whole
    derived.memory, derived.sources = source.memory, (source,)
    if source.make_tokens is not None:
        derived.make_tokens = functools.partial(_derived_tokens, source, operation)
    return _Deferred.all_of((derived,))[0]


def _derived_tokens(source: Pending, operation: Callable[[torch.Tensor], torch.Tensor]) -> Tokens | None:
    tokens = source.tokens()
    result = None if tokens is None else pad_safe.run(operation, (tokens,), {})
    return result if isinstance(result, Tokens) else None  # None: the source was computed since


def by_token(function: Callable[..., Any], args: Sequence[Any], rows: Sequence[int]) -> Any:
    """Call a function that works row by row on the `rows`-th of its arguments; return its results.

    The function runs on tokens if only the tokens of these arguments are known. For integrations, which know such
    functions.
    """
    result = on_tokens(function, tuple(args), {}, functools.partial(pad_safe.row_by_row, rows))
    if result is NotImplemented:
        return function(*(each._pending.asked(function) if isinstance(each, _Deferred) else each for each in args))
    return result


def plain_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a module's call with deferred outputs replaced by their computed values."""
    if any(isinstance(each, _Deferred) for each in (*args, *kwargs.values())):
        args = [each._pending.asked(torch.nn.Module.__call__) if isinstance(each, _Deferred) else each for each in args]
        kwargs = {
            name: each._pending.asked(torch.nn.Module.__call__) if isinstance(each, _Deferred) else each
            for name, each in kwargs.items()
        }
    return args, kwargs


def _writes_to_deferred(func: Any, args: tuple) -> bool:
    return any(
        isinstance(value, _Deferred) and value._pending.requires_grad
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _float(tensor: torch.Tensor, pending: Pending) -> torch.Tensor:
    # Accelerate casts every half-precision output in this way.
    if pending.dtype == torch.float32:
        return tensor
    return _derive(pending, torch.float32, pending.requires_grad and torch.is_grad_enabled(), torch.Tensor.float)


def _detach(tensor: torch.Tensor, pending: Pending) -> torch.Tensor:
    return _derive(pending, pending.dtype, False, torch.Tensor.detach)


def _register_hook(tensor: torch.Tensor, pending: Pending, hook: Any) -> RemovableHandle | None:
    if not pending.requires_grad:
        return None
    if pending.events is not None and is_users(hook):
        pending.events.asked_for_graph(pending.name, torch.Tensor.register_hook)
    if pending.profiled:
        return pending.compute().register_hook(hook)
    return pending.add_hook(hook)


def _retain_grad(tensor: torch.Tensor, pending: Pending) -> None:
    if pending.events is not None:
        pending.events.asked_for_graph(pending.name, torch.Tensor.retain_grad)
    if pending.profiled:
        pending.compute().retain_grad()
        return
    once(
        logging.WARNING,
        "retain_grad() on the deferred output %r: the loss of its step was not computed from it, so only gradients of "
        "what you compute from it yourself will show in .grad; from the next step on it is as in eager",
        pending.name,
    )


# Answered without computing; an answer of None means: compute after all.
_LAZY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.float: _float,
    torch.Tensor.detach: _detach,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
}


# Questions that a deferred tensor answers itself. Not its strides: nobody promised that the value is contiguous.
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
