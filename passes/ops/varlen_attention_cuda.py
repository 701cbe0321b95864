"""The CUDA form of `varlen_attention`: the fastest form that takes a call, measured once on the device.

Each form states why it does not take a call. If several forms take it, they are timed, forward and backward, at the
first call of a class of shapes (`deepytorch.tuning`), and the result is kept on disk. The dense form takes everything,
is slow, and is never measured: it computes what no other form does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops import varlen_attention_efficient as efficient
from deepytorch.passes.ops import varlen_attention_flash as flash
from deepytorch.passes.ops.attention_tile import Call, Gradients, Saved
from deepytorch.tuning import fastest, known, measures_nothing

_TRITON_CAPABILITY = (8, 0)  # the tests compile the Triton kernels for this capability and newer ones
_KERNEL = "varlen_attention_form/1"
_LONG = (256, 1024, 4096)  # limits of classes by the keys of the longest row; each class has a choice of its own
_MARGIN = 0.1  # share of the likeliest form's time: smaller gains are noise, on which ranks would disagree
_FORMS: dict[tuple[object, ...], ModuleType] = {}  # choices of this process, by everything that a choice depends on


class Choice(NamedTuple):
    """The form that computes a call ("flash", "triton", "efficient" or "dense"), and why the others do not."""

    form: str
    reasons: tuple[str, ...] = ()


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q)."""
    return _form(query, key, value, call).forward(query, key, value, call)


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool) -> Gradients:
    """Return the gradients of one call."""
    return _form(*saved[:3], saved.call).backward(saved, grad_output, bias_gradient)


def choose_form(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Choice:
    """Return the form that computes this call, forward and backward, as far as measured, and why no other form does."""
    taking, reasons = _ladder(query, key, value, call)
    if len(taking) < 2:
        return Choice(taking[0] if taking else "dense", reasons)
    if torch.are_deterministic_algorithms_enabled():
        chosen, why = taking[0], "not measured, as deterministic algorithms are asked for"
    else:
        measured = known(_KERNEL, _shape_class(query, key, value, call, taking), taking)
        chosen = measured or taking[0]
        why = "slower where it was measured" if measured else "not measured on this device yet"
    return Choice(chosen, (*reasons, *(f"{form}: {why}" for form in taking if form != chosen)))


def _form(query: Tensor, key: Tensor, value: Tensor, call: Call) -> ModuleType:
    """Return the form that computes this call. At the first call of its class, several forms are measured."""
    if call.bias is not None:  # the choice depends on the bias's strides too, which have many values
        return _choose(query, key, value, call)
    kind = _kind(query, key, value, call)
    form = _FORMS.get(kind)
    if form is None:
        form = _choose(query, key, value, call)
        if not measures_nothing():  # nothing is measured while a graph is recorded
            _FORMS[kind] = form
    return form


def _choose(query: Tensor, key: Tensor, value: Tensor, call: Call) -> ModuleType:
    taking, _ = _ladder(query, key, value, call)
    if len(taking) < 2 or torch.are_deterministic_algorithms_enabled():  # two processes may measure differently
        return _module(taking[0] if taking else "dense")
    shape_class = _shape_class(query, key, value, call, taking)
    return _module(fastest(_KERNEL, shape_class, taking, partial(_run, query, key, value, call), _MARGIN))


def _kind(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[object, ...]:
    """Return what the ladder and the class of shapes depend on, for a call without a bias; no string is made."""
    rule = call.rule
    return (
        query.device.index,
        query.dtype,
        key.dtype,
        value.dtype,
        query.size(2),
        value.size(2),
        query.size(1) == key.size(1),
        rule.window_left,
        rule.window_right,
        rule.dropout_p > 0,
        rule.softcap > 0,
        call.max_q == 0,
        call.max_k == 0,
        _length(call),
        flash.one_token_space(call),
        flash.activated(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _length(call: Call) -> int:
    """Return the class of the longest row's length, by the limits in `_LONG`."""
    return bisect_left(_LONG, call.max_k)


def _ladder(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the forms except the dense one that take a call, the likeliest first, and why the others do not."""
    if torch.version.cuda is None:
        return (), ("flash, triton, efficient: no device of NVIDIA's",)
    capability = _capability(query.device.index)
    refused: dict[str, Callable[[], str | None]] = {
        "flash": lambda: flash.why_not_flash(query, value, call, capability),
        "triton": lambda: _why_not_triton(query, key, value, call, capability),
        "efficient": lambda: efficient.why_not_efficient(query, key, value, call, capability),
    }
    found = {form: why() for form, why in refused.items()}
    taking = tuple(form for form, reason in found.items() if reason is None)
    return taking, tuple(f"{form}: {reason}" for form, reason in found.items() if reason is not None)


def _why_not_triton(query: Tensor, key: Tensor, value: Tensor, call: Call, capability: tuple[int, int]) -> str | None:
    if capability < _TRITON_CAPABILITY:
        return "a device older than Ampere"
    form = _triton()
    return "Triton cannot be imported" if form is None else form.why_not_triton(query, key, value, call)


def _shape_class(query: Tensor, key: Tensor, value: Tensor, call: Call, taking: tuple[str, ...]) -> str:
    """Return the properties that the choice may depend on.

    The properties have few values, as each combination is measured.
    """
    rule = call.rule
    windowed = rule.window_left >= 0 or rule.window_right > 0
    seen = "window" if windowed else "causal" if rule.window_right == 0 else "whole"
    group = "one head" if query.size(1) == key.size(1) else "some heads"
    return (
        f"{'+'.join(taking)} {flash.activated()} {query.dtype} {query.size(2)} {value.size(2)} {seen} {group} a key "
        f"length {_length(call)}"
    )


def _run(query: Tensor, key: Tensor, value: Tensor, call: Call, form: str) -> None:
    """Run a step of one form, to be timed."""
    module = _module(form)
    output, logsumexp = module.forward(query, key, value, call)
    module.backward(Saved(query, key, value, output, logsumexp, call), output, False)


@cache
def _triton() -> ModuleType | None:
    """Return the Triton form, imported at the first call that needs it, or None if there is no Triton."""
    try:
        from deepytorch.passes.ops import varlen_attention_triton
    except ImportError:
        return None
    return varlen_attention_triton


def _module(form: str) -> ModuleType:
    found = {"flash": flash, "triton": _triton(), "efficient": efficient, "dense": dense}[form]
    assert found is not None
    return found


@cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
