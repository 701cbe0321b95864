"""torch's flash kernels for rows of different lengths, as a form of `varlen_attention`.

These are the kernels behind `torch.nn.attention.varlen.varlen_attn`, called below its own autograd: its signature
changed between versions, that of the kernels did not. `torch.nn.attention.activate_flash_attention_impl` puts other
implementations (FA3, FA4) in their place, under the same name; this form then runs the activated implementation.

[Note: No dropout by torch's kernels] The kernels draw dropout from the state of torch's generator. `varlen_attention`
promises that its seed alone decides: a forward that is recomputed, also under a checkpoint in a compiled graph, would
draw anew, and its gradients would be those of another function. Calls with dropout go to forms that hash the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import Call, Gradients, Saved, inner_adjacent
from deepytorch.torch_internals import FakeTensor, flash_attention_backward, flash_attention_forward

_MAX_HEAD_DIM = 256
_CAPABILITY = (8, 0)
# Limits of each implementation that can be activated: majors of devices, and head dims of its backward.
_ACTIVATED = {"FA3": ((9,), 256), "FA4": ((9, 10), 128)}


def activated() -> str | None:
    """Return the name of the implementation that replaces torch's own kernels, or None if none does."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def why_not_flash(query: Tensor, value: Tensor, call: Call, capability: tuple[int, int]) -> str | None:
    """Return the reason why the flash kernels cannot compute this call on an NVIDIA device, or None if they can."""
    head_dim, rule, name = query.size(2), call.rule, activated()
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}"
    if capability < _CAPABILITY:
        return "a device older than Ampere"
    if name is not None and name not in _ACTIVATED:
        return f"an implementation that nobody has read, {name}, stands in their place"
    majors, longest = (range(8, 1 << 10), _MAX_HEAD_DIM) if name is None else _ACTIVATED[name]
    if capability[0] not in majors:
        return f"{name}, which stands in their place, is not for compute capability {capability[0]}.{capability[1]}"
    if head_dim != value.size(2) or head_dim > longest or head_dim % 8:
        return f"head_dim {head_dim} of keys and {value.size(2)} of values"
    reason = why_not_torch(call)
    if reason is not None:
        return reason
    # The kernels align windows at a row's last query and key, the operator at its first: equal if both are as many.
    if (rule.window_left >= 0 or rule.window_right >= 0) and not one_token_space(call):
        return "a window between two token spaces"
    return None


def why_not_torch(call: Call) -> str | None:
    """Return the reason why neither of torch's kernels can compute a call, or None."""
    if call.bias is not None:  # the efficient kernels expect one with the strides of padded rows
        return "a bias"
    if call.rule.softcap > 0:
        return "softcap"
    if call.rule.dropout_p > 0:  # see [Note: No dropout by torch's kernels]
        return "dropout, which a recomputed forward would draw anew"
    return "no tokens" if call.max_q == 0 or call.max_k == 0 else None


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output (tokens_q, heads_q, head_dim_v) and logsumexp (heads_q, tokens_q)."""
    rule = call.rule
    output, logsumexp, *_ = flash_attention_forward(
        *(inner_adjacent(x) for x in (query, key, value)),
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


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool) -> Gradients:
    """Return the gradients of one call, without one of the bias, which this form never has."""
    query, key, value, output, logsumexp, call = saved
    rule = call.rule
    grad_query, grad_key, grad_value = flash_attention_backward(
        grad_output.contiguous(),
        *(inner_adjacent(x) for x in (query, key, value)),
        output,
        logsumexp,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_q,
        call.max_k,
        0.0,
        _is_causal(call),
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # the state of dropout, which is not used
        torch.empty(0, device=query.device),
        scale=rule.scale,
        window_size_left=rule.window_left,
        window_size_right=rule.window_right,
    )
    return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous(), query.new_empty(0)


def _is_causal(call: Call) -> bool:
    return call.rule.window_left < 0 and call.rule.window_right == 0


def one_token_space(call: Call) -> bool:
    """Return whether queries and keys are the same tokens, as far as is known without reading the device."""
    x, y = call.cu_seqlens_q, call.cu_seqlens_k
    if x is y:
        return True
    has_memory = not isinstance(x, FakeTensor)
    return has_memory and x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
