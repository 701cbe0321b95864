"""Uses of deferred tensors that need their tokens only: the results of `pad_safe`, deferred again.

[Note: writes into an object]
A deferred tensor cannot be written to as tokens if in eager it would share its memory with another one (a view), or if
another one was computed from it. Then the padded values of all deferred tensors of the step are made first, in the
order of their making, and the write happens as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepytorch.compiler.step.outputs import pad_safe
from deepytorch.compiler.step.outputs.pending import Pending, PendingTensor
from deepytorch.compiler.step.outputs.rules.by_feature import Several
from deepytorch.compiler.step.outputs.tokens import Tokens
from deepytorch.compiler.step.past import VALUES_ALONE, version_of
from deepytorch.errors import DeferredError


@torch.compiler.disable(reason="uses of an output's tokens are looked up when they happen")
def on_tokens(function: Any, args: Any, kwargs: Any, rule: Callable[..., Any] | None = None) -> Any:
    """Call `function` on the tokens of its deferred arguments; return its result, or `NotImplemented`."""
    in_place = function in pad_safe.OUT_OF_PLACE
    if not in_place and function not in pad_safe.TABLE and rule is None:
        return NotImplemented
    pendings: list[Pending] = []

    def unwrapped(each: Any) -> Any:
        if isinstance(each, PendingTensor):
            tokens = each._pending.tokens()
            if tokens is None:
                return each._pending.asked(function)
            pendings.append(each._pending)
            return tokens
        return each

    deferred = _all_deferred(args, kwargs)
    if any(each._pending.make_tokens is None and each._pending.value is None for each in deferred):
        return NotImplemented
    inside, named = _mapped(args, unwrapped), _mapped(kwargs, unwrapped)
    if not pendings:
        return NotImplemented
    if in_place:
        return _written(function, args, kwargs, inside, named)
    result = (rule or pad_safe.run)(function, inside, named)
    if result is NotImplemented:
        return NotImplemented
    source = pendings[0]
    if source.events is not None:
        source.events.used_tokens(source.name, function)
    if isinstance(result, torch.Tensor):
        return result
    first = inside[0] if inside else None
    if function in pad_safe.CASTS and isinstance(result, Tokens) and isinstance(first, Tokens):
        described = (result.dtype, result.device) == (first.dtype, first.device)
        if described and not kwargs.get("copy"):
            return args[0]
    is_view, kind = function in pad_safe.VIEWS, type(deferred[0])

    def wrapped(tokens: Any, key: int | None = None) -> Any:
        if not isinstance(tokens, Tokens):
            return tokens
        recipe = _Recipe(function, args, kwargs, key)
        pending = Pending(tokens.shape, tokens.dtype, tokens.device, tokens.requires_grad, source.name, recipe)
        pending.make_tokens, pending.events, pending.family = (lambda: tokens), source.events, source.family
        pending.memory = source.memory if is_view else pending.memory
        pending.sources = tuple(pendings)
        return kind.all_of((pending,))[0]

    if isinstance(result, Tokens):
        return wrapped(result)
    items = result.items if isinstance(result, Several) else result
    results = [wrapped(each, key) for key, each in enumerate(items)]
    return result.kind(results) if isinstance(result, Several) else type(result)(results)


def _written(function: Any, args: Any, kwargs: Any, inside: Any, named: Any) -> Any:
    """Write into the tokens of the first argument; else compute all other deferred tensors of the step, for eager."""
    tensor, tokens = args[0], inside[0]
    if not isinstance(tensor, PendingTensor):
        return NotImplemented
    pending = tensor._pending
    others = pending.family.others(tensor)
    plain = pad_safe.OUT_OF_PLACE[function]
    if isinstance(tokens, Tokens) and not any(each.comes_from(pending) for each in others):
        result = pad_safe.run(plain, inside, named)
        if isinstance(result, Tokens):
            described = (result.shape, result.dtype, result.device, result.requires_grad)
            if described == (tokens.shape, tokens.dtype, tokens.device, pending.requires_grad):
                pending.become(result, _Recipe(plain, (pending.moved(), *args[1:]), kwargs))
                if pending.events is not None:
                    pending.events.used_tokens(pending.name, function)
                return tensor
    for each in others:
        each.asked(function)
    return NotImplemented


def may_write(function: Any, kwargs: Any) -> bool:
    """Return whether a torch function changes its first argument."""
    name = getattr(function, "__name__", "")
    return bool(kwargs.get("inplace")) or name in _WRITES or (name.endswith("_") and not name.startswith("_"))


_WRITES = ("__set__", "__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)))  # fmt: skip


@torch.compiler.disable(reason="before a write the other outputs of the step are computed")
def compute_others(function: Any, tensor: PendingTensor) -> None:
    """Compute the step's other deferred tensors, before `function` writes into `tensor`: they may depend on it."""
    for each in tensor._pending.family.others(tensor):
        each.asked(function)


class _Recipe:
    """A call on padded values, to be made when somebody needs its result.

    Masks and labels are copied, as scripts change them in place. A change of any other argument in between is an error.
    """

    __slots__ = ("_args", "_function", "_key", "_kwargs", "_versions")

    def __init__(self, function: Any, args: Any, kwargs: Any, key: int | None = None) -> None:
        self._function, self._key = function, key
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._args, self._kwargs = _mapped(args, self._kept), _mapped(kwargs, self._kept)

    def _kept(self, each: Any) -> Any:
        if isinstance(each, PendingTensor):
            if each._pending.value is None:
                return each._pending
            each = each._pending.value
        if isinstance(each, torch.Tensor):
            if not each.is_floating_point() and each.numel() <= _SMALL:
                return each.clone()
            self._versions.append((each, version_of(each)))
        return each

    def __call__(self) -> torch.Tensor:
        args, kwargs = _mapped(self._args, self._padded), _mapped(self._kwargs, self._padded)
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise DeferredError(
                    f"padded positions of what {self._function.__name__} gave are looked at, and a tensor of shape "
                    f"{tuple(tensor.shape)} that it was given has been changed in place since; expected it unchanged: "
                    "look at them before, or compile with torch.compile(..., options={'defer_outputs': False})"
                )
        result = self._function(*args, **kwargs)
        return result if self._key is None else result[self._key]

    def _padded(self, each: Any) -> Any:
        if not isinstance(each, Pending):
            return each
        value = each.compute()
        if VALUES_ALONE.get():
            return value
        self._versions.append((value, each.version))
        return value


_SMALL = 1 << 20  # entries of a tensor of integers that is copied for later


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return the arguments of a call with `change` applied to each, in lists too."""
    if isinstance(values, dict):
        return {name: _mapped_one(each, change) for name, each in values.items()}
    return tuple(_mapped_one(each, change) for each in values)


def _mapped_one(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped_one(each, change) for each in value)
    return change(value)


def _all_deferred(args: Any, kwargs: Any) -> list[PendingTensor]:
    found: list[PendingTensor] = []

    def note(each: Any) -> None:
        if isinstance(each, PendingTensor):
            found.append(each)

    _mapped(args, note)
    _mapped(kwargs, note)
    return found
