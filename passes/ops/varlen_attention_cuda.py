"""The CUDA form of `varlen_attention`: torch's flash kernels for packed rows, else ours in Triton, else the dense form.

The flash kernels are those behind `torch.nn.attention.varlen.varlen_attn`, called below its own autograd; its signature
moved between versions, theirs did not.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops.attention_tile import Call
from deepytorch.torch_internals import FakeTensor, flash_attention_backward, flash_attention_forward

_FLASH_MAX_HEAD_DIM = 256
_FLASH_CAPABILITY = (8, 0)
_TRITON_CAPABILITY = (8, 0)  # what the Triton kernels are compiled for in the tests, and newer


class Choice(NamedTuple):
    """The form that computes a call: "flash", "triton" or "dense", and why those before it in this list do not."""

    form: str
    reasons: tuple[str, ...] = ()


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q)."""
    form = choose_form(query, key, value, call).form
    if form != "flash":
        return _module(form).forward(query, key, value, call)
    rule = call.rule
    output, logsumexp, *_ = flash_attention_forward(
        *(_inner_adjacent(x) for x in (query, key, value)),
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_q,
        call.max_k,
        0.0,
        _is_causal(call),
        return_debug_mask=False,
        scale=rule.scale,
        window_size_left=rule.window_left,
        window_size_right=rule.window_right,
    )
    return output, logsumexp


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    call: Call,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty when it is not asked for."""
    form = choose_form(query, key, value, call).form
    if form != "flash":
        return _module(form).backward(grad_output, query, key, value, output, logsumexp, call, bias_gradient)
    rule = call.rule
    grad_query, grad_key, grad_value = flash_attention_backward(
        grad_output.contiguous(),
        *(_inner_adjacent(x) for x in (query, key, value)),
        output,
        logsumexp,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_q,
        call.max_k,
        0.0,
        _is_causal(call),
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # the state of a dropout that there is not
        torch.empty(0, device=query.device),
        scale=rule.scale,
        window_size_left=rule.window_left,
        window_size_right=rule.window_right,
    )
    return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous(), query.new_empty(0)


def choose_form(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Choice:
    """Which form computes this call, forward and backward alike; it does not wait for the device."""
    no_flash = why_not_flash(query, value, call)
    if no_flash is None:
        return Choice("flash")
    no_triton = _why_not_triton(query, key, value, call)
    if no_triton is None:
        return Choice("triton", (f"flash: {no_flash}",))
    return Choice("dense", (f"flash: {no_flash}", f"triton: {no_triton}"))


def _why_not_triton(query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
    if torch.version.cuda is None or _capability(query.device.index) < _TRITON_CAPABILITY:
        return "a device older than Ampere, or not NVIDIA's"
    form = _triton()
    return "Triton cannot be imported" if form is None else form.why_not_triton(query, key, value, call)


@cache
def _triton() -> ModuleType | None:
    """The Triton form, imported at the first call that needs it; None where there is no Triton."""
    try:
        from deepytorch.passes.ops import varlen_attention_triton
    except ImportError:
        return None
    return varlen_attention_triton


def _module(form: str) -> ModuleType:
    found = _triton() if form == "triton" else dense
    assert found is not None
    return found


def why_not_flash(query: Tensor, value: Tensor, call: Call) -> str | None:
    """The reason why the flash kernels cannot compute this call, or None when they can."""
    head_dim, rule = query.size(2), call.rule
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}"
    if torch.version.cuda is None or _capability(query.device.index) < _FLASH_CAPABILITY:
        return "a device older than Ampere, or not NVIDIA's"
    if head_dim != value.size(2) or head_dim > _FLASH_MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim {head_dim} of keys and {value.size(2)} of values"
    if call.bias is not None or rule.dropout_p > 0 or rule.softcap > 0:
        return "a bias, dropout or softcap"
    if call.max_q == 0 or call.max_k == 0:
        return "no tokens"
    # The kernels align windows at a row's last query and key, we at its first: the same only where both are as many.
    if (rule.window_left >= 0 or rule.window_right >= 0) and not _same(call.cu_seqlens_q, call.cu_seqlens_k):
        return "a window between two token spaces"
    return None


def _is_causal(call: Call) -> bool:
    return call.rule.window_left < 0 and call.rule.window_right == 0


def _same(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    has_memory = not isinstance(x, FakeTensor)
    return has_memory and x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _inner_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
