"""torch's memory-efficient kernels as a form of `varlen_attention`: also for float32, and for GPUs older than Ampere.

Rows lie one after another as in `varlen_attention`, under a batch dimension of 1. Logsumexp has another shape: (rows,
heads, longest row rounded up to 32), infinite after a row's end, as the backward reads whole tiles of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import Call, Gradients, Saved
from deepytorch.passes.ops.varlen_attention_dense import laid_out
from deepytorch.passes.ops.varlen_attention_flash import one_token_space, why_not_torch
from deepytorch.torch_internals import efficient_attention_backward, efficient_attention_forward

_CAPABILITY = (5, 0)
_BYTES = 16  # the kernels read this many at once, so a head dim must be a multiple of them
_LSE_ALIGNMENT = 32
_WHOLE, _CAUSAL = 0, 1  # values of `custom_mask_type`: no mask, or causal from the top left


def why_not_efficient(query: Tensor, key: Tensor, value: Tensor, call: Call, capability: tuple[int, int]) -> str | None:
    """Return the reason why these kernels cannot compute this call on an NVIDIA device, or None if they can."""
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value of dtypes {query.dtype}, {key.dtype} and {value.dtype}"
    if capability < _CAPABILITY or (query.dtype == torch.bfloat16 and capability < (8, 0)):
        return f"{query.dtype} on compute capability {capability[0]}.{capability[1]}"
    elements = _BYTES // query.element_size()
    if query.size(2) % elements or value.size(2) % elements or 0 in (query.size(2), value.size(2)):
        return f"head_dim {query.size(2)} of keys and {value.size(2)} of values"
    reason = why_not_torch(call)
    if reason is not None:
        return reason
    if call.rule.window_left >= 0 or call.rule.window_right > 0:
        return "a window"
    if not one_token_space(call):  # a row may have no key, for which the kernels promise nothing
        return "two token spaces"
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output (tokens, heads_q, head_dim_v) and logsumexp (heads_q, tokens)."""
    group = query.size(1) // key.size(1)
    output, padded, *_ = efficient_attention_forward(
        *(_batched(x) for x in (query, _repeated(key, group), _repeated(value, group))),
        None,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_q,
        call.max_k,
        0.0,
        _mask_type(call),
        True,
        scale=call.rule.scale,
    )
    row, index = _places(query.size(0), call)
    return output[0].contiguous(), padded[row, :, index].t().contiguous()


def backward(saved: Saved, grad_output: Tensor, bias_gradient: bool) -> Gradients:
    """Return the gradients of one call, without one of the bias, which this form never has."""
    query, key, value, output, logsumexp, call = saved
    group = query.size(1) // key.size(1)
    nothing_drawn = torch.zeros((), dtype=torch.int64, device=query.device)
    grad_query, grad_key, grad_value, _ = efficient_attention_backward(
        _batched(grad_output),
        *(_batched(x) for x in (query, _repeated(key, group), _repeated(value, group))),
        None,
        _batched(output),
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_q,
        call.max_k,
        _padded(logsumexp, call),
        0.0,
        nothing_drawn,
        nothing_drawn,
        _mask_type(call),
        False,
        scale=call.rule.scale,
    )
    grads = grad_query[0], _summed(grad_key[0], group), _summed(grad_value[0], group)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous(), query.new_empty(0)


def _batched(x: Tensor) -> Tensor:
    """Convert (tokens, heads, head_dim) to (1, tokens, heads, head_dim), in the memory layout that the kernels read."""
    elements = _BYTES // x.element_size()
    aligned = x.stride(2) == 1 and not any(each % elements for each in (x.stride(0), x.stride(1)))
    return (x if aligned and x.data_ptr() % _BYTES == 0 else x.contiguous())[None]


def _repeated(x: Tensor, group: int) -> Tensor:
    """Repeat heads of keys or values: one for each query head."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(grad: Tensor, group: int) -> Tensor:
    """Return the gradient of the input of `_repeated`."""
    return grad if group == 1 else grad.unflatten(1, (-1, group)).sum(2)


def _mask_type(call: Call) -> int:
    return _CAUSAL if call.rule.window_right == 0 else _WHOLE


def _places(tokens: int, call: Call) -> tuple[Tensor, Tensor]:
    """Return each token's row and its index inside the row, (tokens,) int64 both."""
    slot = laid_out(tokens, call.cu_seqlens_q, call.max_q, None).slot
    return slot // call.max_q, slot % call.max_q


def _padded(logsumexp: Tensor, call: Call) -> Tensor:
    """Convert (heads, tokens) to (rows, heads, longest row rounded up)."""
    heads, tokens = logsumexp.shape
    width = -(-call.max_q // _LSE_ALIGNMENT) * _LSE_ALIGNMENT
    padded = logsumexp.new_full((call.cu_seqlens_q.size(0) - 1, heads, width), float("inf"))
    row, index = _places(tokens, call)
    padded[row, :, index] = logsumexp.t()
    return padded
