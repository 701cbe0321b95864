"""An output that is computed when it is first used, or of which only the tokens are: `outputs.logits`, as ever.

A packed step needs no logits for its loss, and knows nothing of what stands at pads. It hands its user an object in
their place: a tensor whose shape, dtype and device are known and whose numbers are made at the first operation that
looks at them, from what its closures hold. What is done with it decides how much is made: uses that no pad has a part
in (`pad_safe`) run on the tokens, and give such objects again; any other use gets the padded value, with eager's
numbers at pads too, which from then on takes the object's place.

[Note: writes into an object]
An object whose memory would be another one's too in eager (a view), or which another one was computed from, cannot be
written to as tokens: the padded values of all objects of the step are made first, in the order of their making, and
then the write is what it is in eager.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from deepytorch.compiler.outputs import pad_safe
from deepytorch.compiler.outputs.rules.by_feature import Several
from deepytorch.compiler.outputs.tokens import Modes, Tokens
from deepytorch.compiler.outputs.usage import Usage, is_users
from deepytorch.errors import DeferredError
from deepytorch.log import once
from deepytorch.passes.samples import same_bits, sample
from deepytorch.patches import listen

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
    tokens: Callable[[], Tokens | None] | None = None,
    usage: Usage | None = None,
    family: Family | None = None,
    watched: bool = False,
    whole: bool = False,
) -> torch.Tensor:
    """A tensor of `shape`, `dtype` and `device` that `compute` makes when its values are first used, once.

    `compute(dependencies)` is given `depends_on` as it was now: the same tensors, or copies where an optimizer has
    stepped since. It must read no other tensor that can change, draw no random numbers, and return a tensor of the
    described shape, dtype and device. It runs under the grad mode, the inference mode and the autocast state of this
    call, and is released after that.
    `requires_grad` holds only while gradients are enabled, as for the result of any operation.

    tokens: gives the value's tokens, for uses that take no more. usage: is told of every use. family: of all deferred
    outputs of one step. watched: `compute` gives a tensor of the graph that eager has made already. whole: it has no
    pads that cost anything.

    Raises (at the use, not here) `DeferredError` when a dependency has changed other than by `Optimizer.step`.
    """
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        device = torch.empty(0, device=device).device  # "cuda" is the current one of them
    requires_grad = requires_grad and torch.is_grad_enabled()
    kept = Kept(depends_on, name) if depends_on else None
    pending = _Pending(tuple(shape), dtype, device, requires_grad, name, compute, kept)
    pending.make_tokens, pending.usage, pending.watched, pending.whole = tokens, usage, watched, whole
    pending.family = family if family is not None else Family()
    return _wrap(pending, compute([]) if watched else None)


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


class Family:
    """The deferred tensors of one step, in the order of their making, as long as somebody holds them."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(weakref.ref(tensor))

    def others(self, tensor: torch.Tensor) -> list[_Pending]:
        """Of all that live, are not computed, and are not `tensor`."""
        found = [held for each in self._tensors if (held := each()) is not None and held is not tensor]
        return [held._pending for held in found if held._pending.value is None]  # type: ignore[attr-defined]


class _Pending:
    """What a deferred tensor stands for: how to compute it, and its value once that was done.

    The tensor and its autograd node own it and it owns neither, so it dies with the tensor.
    """

    __slots__ = (
        "__weakref__", "_compute", "_modes", "device", "dtype", "family", "hooks", "kept", "make_tokens",
        "memory", "name", "requires_grad", "shape", "sources", "usage", "value", "version", "watched",
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
        self.usage: Usage | None = None
        self.watched = self.whole = False
        self.family = Family()
        self.memory = object()  # what stands for the memory that it would share with its views
        self.sources: tuple[_Pending, ...] = ()  # what it was computed from
        self.version = -1  # of the value when it was computed

    def tokens(self) -> Tokens | None:
        """Its tokens, if it has them and nobody needed more."""
        return self.make_tokens() if self.make_tokens is not None and self.value is None else None

    def asked(self, function: Any) -> torch.Tensor:
        """The value, for a function that takes all of it."""
        if self.value is None and self.usage is not None:
            if function in _OF_GRAPHS:
                self.usage.graph(self.name, function)
            elif not self.whole:
                self.usage.padded(self.name, function)
        return self.compute()

    def comes_from(self, other: _Pending) -> bool:
        """Whether it shares memory with `other` or was computed from it."""
        return self.memory is other.memory or any(each is other or each.comes_from(other) for each in self.sources)

    def moved(self) -> _Pending:
        """Another one for the same value, which this one is about to be no more."""
        assert self._compute is not None
        before = _Pending(self.shape, self.dtype, self.device, self.requires_grad, self.name, self._compute, self.kept)
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
        self.version = _version(value)
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

    def derive(
        self, dtype: torch.dtype, requires_grad: bool, operation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`operation` on this value, deferred too; it is computed with this value and then cheap."""
        derived = _Pending(
            self.shape, dtype, self.device, requires_grad, self.name, lambda _: operation(self.compute())
        )
        derived.usage, derived.family, derived.memory, derived.sources = self.usage, self.family, self.memory, (self,)
        derived.whole = self.whole
        if self.make_tokens is not None:
            derived.make_tokens = functools.partial(_derived_tokens, self, operation)
        return _wrap(derived)


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
        if not torch.compiler.is_dynamo_compiling():
            result = _on_tokens(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
            if isinstance(tensor, _Deferred) and _may_write(func, kwargs or {}):
                _compute_all(func, tensor)
        args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.asked(func), (args, kwargs or {}))
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
            args, kwargs = tree_map_only(_Deferred, lambda deferred: deferred._pending.asked(func), (args, kwargs))
        return func(*args, **kwargs)


# ---------------------------------------------------------------------- tokens alone


def _derived_tokens(source: _Pending, operation: Callable[[torch.Tensor], torch.Tensor]) -> Tokens | None:
    tokens = source.tokens()
    result = None if tokens is None else pad_safe.run(operation, (tokens,), {})
    return result if isinstance(result, Tokens) else None  # None: was computed since


def by_token(function: Callable[..., Any], args: Sequence[Any], rows: Sequence[int]) -> Any:
    """`function(*args)` for one that works row by row, as the `rows`-th of its arguments and its results go: on tokens
    where these are what is known of its arguments. For integrations, which know such functions.
    """
    result = _on_tokens(function, tuple(args), {}, functools.partial(pad_safe.row_by_row, rows))
    if result is NotImplemented:
        return function(*(each._pending.asked(function) if isinstance(each, _Deferred) else each for each in args))
    return result


def plain_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments of a call of a module without deferred outputs among them: those have been computed."""
    if any(isinstance(each, _Deferred) for each in (*args, *kwargs.values())):
        args = [each._pending.asked(torch.nn.Module.__call__) if isinstance(each, _Deferred) else each for each in args]
        kwargs = {
            name: each._pending.asked(torch.nn.Module.__call__) if isinstance(each, _Deferred) else each
            for name, each in kwargs.items()
        }
    return args, kwargs


@torch.compiler.disable(reason="uses of an output's tokens are looked up when they happen")
def _on_tokens(function: Any, args: Any, kwargs: Any, rule: Callable[..., Any] | None = None) -> Any:
    """`function` on the tokens of its deferred arguments, or `NotImplemented`."""
    in_place = function in pad_safe.OUT_OF_PLACE
    if not in_place and function not in pad_safe.TABLE and rule is None:
        return NotImplemented
    pendings: list[_Pending] = []

    def unwrapped(each: Any) -> Any:
        if isinstance(each, _Deferred):
            tokens = each._pending.tokens()
            if tokens is None:
                return each._pending.asked(function)
            pendings.append(each._pending)
            return tokens
        return each

    if any(each._pending.make_tokens is None and each._pending.value is None for each in _all_deferred(args, kwargs)):
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
    if source.usage is not None:
        source.usage.packed(source.name, function)
    if isinstance(result, torch.Tensor):
        return result
    first = inside[0] if inside else None
    if function in pad_safe.CASTS and isinstance(result, Tokens) and isinstance(first, Tokens):
        described = (result.dtype, result.device) == (first.dtype, first.device)
        if described and not kwargs.get("copy"):
            return args[0]
    is_view = function in pad_safe.VIEWS

    def wrapped(tokens: Any, key: int | None = None) -> Any:
        if not isinstance(tokens, Tokens):
            return tokens
        recipe = _Recipe(function, args, kwargs, key)
        pending = _Pending(tokens.shape, tokens.dtype, tokens.device, tokens.requires_grad, source.name, recipe)
        pending.make_tokens, pending.usage, pending.family = (lambda: tokens), source.usage, source.family
        pending.memory = source.memory if is_view else pending.memory
        pending.sources = tuple(pendings)
        return _wrap(pending)

    if isinstance(result, Tokens):
        return wrapped(result)
    items = result.items if isinstance(result, Several) else result
    results = [wrapped(each, key) for key, each in enumerate(items)]
    return result.kind(results) if isinstance(result, Several) else type(result)(results)


def _written(function: Any, args: Any, kwargs: Any, inside: Any, named: Any) -> Any:
    """A write into the tokens of the first argument; of all that hangs together with it where that cannot be."""
    tensor, tokens = args[0], inside[0]
    if not isinstance(tensor, _Deferred):
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
                if pending.usage is not None:
                    pending.usage.packed(pending.name, function)
                return tensor
    for each in others:
        each.asked(function)
    return NotImplemented


def _may_write(function: Any, kwargs: Any) -> bool:
    """Whether a torch function changes its first argument."""
    name = getattr(function, "__name__", "")
    return bool(kwargs.get("inplace")) or name in _WRITES or (name.endswith("_") and not name.startswith("_"))


_WRITES = ("__set__", "__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)))  # fmt: skip


@torch.compiler.disable(reason="before a write the other outputs of the step are computed")
def _compute_all(function: Any, tensor: torch.Tensor) -> None:
    for each in tensor._pending.family.others(tensor):  # type: ignore[attr-defined]
        each.asked(function)


class _Recipe:
    """A call on padded values, to be made when somebody needs what it gives.

    Masks and labels are copied, as scripts change them in place; another argument that has changed since is an error.
    """

    __slots__ = ("_args", "_function", "_key", "_kwargs", "_versions")

    def __init__(self, function: Any, args: Any, kwargs: Any, key: int | None = None) -> None:
        self._function, self._key = function, key
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._args, self._kwargs = _mapped(args, self._kept), _mapped(kwargs, self._kept)

    def _kept(self, each: Any) -> Any:
        if isinstance(each, _Deferred):
            if each._pending.value is None:
                return each._pending
            each = each._pending.value
        if isinstance(each, torch.Tensor):
            if not each.is_floating_point() and each.numel() <= _SMALL:
                return each.clone()
            self._versions.append((each, _version(each)))
        return each

    def __call__(self, _: Any) -> torch.Tensor:
        args, kwargs = _mapped(self._args, self._padded), _mapped(self._kwargs, self._padded)
        for tensor, version in self._versions:
            if _version(tensor) != version:
                raise DeferredError(
                    f"padded positions of what {self._function.__name__} gave are looked at, and a tensor of shape "
                    f"{tuple(tensor.shape)} that it was given has been changed in place since; expected it unchanged: "
                    f"{_ADVICE}"
                )
        result = self._function(*args, **kwargs)
        return result if self._key is None else result[self._key]

    def _padded(self, each: Any) -> Any:
        if not isinstance(each, _Pending):
            return each
        value = each.compute()
        self._versions.append((value, each.version))
        return value


_SMALL = 1 << 20  # entries of a tensor of integers that is copied for later


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of a call with `change` applied to each, in lists too."""
    if isinstance(values, dict):
        return {name: _mapped_one(each, change) for name, each in values.items()}
    return tuple(_mapped_one(each, change) for each in values)


def _mapped_one(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped_one(each, change) for each in value)
    return change(value)


def _all_deferred(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []

    def note(each: Any) -> None:
        if isinstance(each, _Deferred):
            found.append(each)

    _mapped(args, note)
    _mapped(kwargs, note)
    return found


class _Source(torch.autograd.Function):
    """The autograd node of a deferred tensor, for gradients of uses that Python does not see (`Function.apply`).

    It runs the value's backward inside its own. One backward pass that comes both through it and through an ordinary
    use reaches the value's graph twice, and autograd refuses that, aloud.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a loss beside it, through a node that both share, has no gradient for it
        ctx.pending, ctx.is_value = pending, anchor is not _ANCHOR
        return _bare(pending)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None or ctx.is_value:  # then the anchor is the value itself
            return gradient, None
        value = ctx.pending.compute()
        if value.requires_grad:
            torch.autograd.backward(value, gradient)
        return None, None


_ANCHOR = torch.empty((), requires_grad=True)  # what the node of a deferred tensor hangs on; it never gets a gradient


def _wrap(pending: _Pending, anchor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that stands for `pending`. anchor: the value, if it is there."""
    if pending.requires_grad:
        with torch.enable_grad():
            tensor = _Source.apply(_ANCHOR if anchor is None else anchor, pending)
    else:
        tensor = _bare(pending)
    pending.family.add(tensor)
    return tensor


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
    if not pending.requires_grad:
        return None
    if pending.usage is not None and is_users(hook):
        pending.usage.graph(pending.name, torch.Tensor.register_hook)
    if pending.watched:
        return pending.compute().register_hook(hook)
    return pending.add_hook(hook)


def _retain_grad(tensor: torch.Tensor, pending: _Pending) -> None:
    if pending.usage is not None:
        pending.usage.graph(pending.name, torch.Tensor.retain_grad)
    if pending.watched:
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

# Uses that ask for a tensor's place between the weights and the loss.
_OF_GRAPHS = frozenset((torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad))

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
