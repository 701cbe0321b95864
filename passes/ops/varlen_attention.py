"""`deepytorch::varlen_attention`: attention over rows of different lengths packed one after another, without padding.

A row's queries see only keys of the same row. This file registers the operator: schema, shapes, autograd, autocast. The
work is done in `varlen_attention_cpu`, `varlen_attention_cuda` and `varlen_attention_dense`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepytorch.passes.ops import varlen_attention_cpu as cpu
from deepytorch.passes.ops import varlen_attention_cuda as cuda
from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved, statistics_dtype
from deepytorch.passes.ops.library import register
from deepytorch.passes.ops.reference import second_derivatives, varlen_attention_reference
from deepytorch.torch_internals import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, disable_dynamo

_SHARED = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, SymInt max_k, Tensor? bias=None, "
    "Tensor? positions_q=None, Tensor? positions_k=None, Tensor? seed=None, Tensor? sinks=None, *, float scale, "
    "int window_left=-1, int window_right=-1, float dropout_p=0.0, float softcap=0.0"
)
_FORWARD = f"varlen_attention(Tensor query, Tensor key, Tensor value, {_SHARED}) -> (Tensor output, Tensor logsumexp)"
_BACKWARD = (
    "varlen_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, "
    f"Tensor logsumexp, {_SHARED}, bool bias_gradient=False) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_sinks)"
)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    bias: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Compute attention over packed rows: softmax(softcap(scale * query @ key.T) + bias) @ value, each row on its own.

    Args:
        query: (tokens_q, heads_q, head_dim), floating.
        key: (tokens_k, heads_k, head_dim); heads_q is a multiple of heads_k, and adjacent query heads share a key head.
        value: (tokens_k, heads_k, head_dim_v).
        cu_seqlens_q: (rows + 1,) int32, where each row's queries begin; the last entry is tokens_q.
        cu_seqlens_k: likewise for keys and values. A row may be empty on either side.
        max_q: length of the longest row of queries, or more.
        max_k: likewise for keys.
        bias: added to the scores; (rows or 1, heads_q or 1, positions_q or 1, positions_k or 1), floating, may hold
            -inf. Differentiable.
        positions_q: (tokens_q,) int64, where each query stands in `bias`, no two of a row alike. Without it: at its
            index inside its row.
        positions_k: likewise for keys.
        seed: () int64, decides which probabilities are dropped: the same seed drops the same. Drawn from torch's
            generator when dropout is asked for without it.
        sinks: (heads_q,), floating: a score that every query of a head has beside those of its keys, for a value of
            zeros (attention sinks, Xiao et al. 2023, arXiv:2309.17453, learned as in GPT-OSS); (tokens_q, heads_q) if
            each query has its own. Differentiable.
        scale: factor of the products; 1 / sqrt(head_dim) when None.
        window_left: how many keys before its own index a query sees, counted inside the row; -1: all of them.
        window_right: likewise after its own index. Causal attention is 0.
        dropout_p: probability that a probability is dropped, in [0, 1).
        softcap: scores become softcap * tanh(scores / softcap) when it is positive.

    Returns:
        (tokens_q, heads_q, head_dim_v), contiguous, in the query's dtype. A query that sees no key, or only keys whose
        bias is -inf, gets zeros.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit together.
    """
    rule = Rule(
        1.0 / math.sqrt(max(query.size(-1), 1)) if scale is None else float(scale),
        window_left,
        window_right,
        float(dropout_p),
        float(softcap),
    )
    if dropout_p > 0 and seed is None:
        seed = torch.randint(2**62, (), device=query.device)
    call = Call(cu_seqlens_q, cu_seqlens_k, max_q, max_k, rule, bias, positions_q, positions_k, seed, sinks)
    _check(query, key, value, call)
    return torch.ops.deepytorch.varlen_attention.default(query, key, value, *call[:4], *call[5:], **rule._asdict())[0]


def _check(query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3 or not x.is_floating_point():
            raise _wrong(
                f"{name} of shape {tuple(x.shape)} and dtype {x.dtype}",
                "(tokens, heads, head_dim), floating: pack the rows of a batch one after another",
            )
    if not (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(query.device.type)):
        raise _wrong(
            f"query, key and value of dtypes {query.dtype}, {key.dtype} and {value.dtype}",
            "one dtype: cast them, or run under autocast",
        )
    if query.size(2) != key.size(2):
        raise _wrong(f"head_dim {query.size(2)} of query and {key.size(2)} of key", "the same in both")
    if key.shape[:2] != value.shape[:2]:
        raise _wrong(
            f"key of shape {tuple(key.shape)} and value of shape {tuple(value.shape)}",
            "as many tokens and heads in one as in the other",
        )
    if key.size(1) == 0 or query.size(1) % key.size(1):
        raise _wrong(
            f"{query.size(1)} query heads and {key.size(1)} key heads",
            "a multiple of the number of key heads as query heads",
        )
    for name, x in (("cu_seqlens_q", call.cu_seqlens_q), ("cu_seqlens_k", call.cu_seqlens_k)):
        if x.dim() != 1 or x.size(0) == 0 or x.dtype != torch.int32:
            raise _wrong(
                f"{name} of shape {tuple(x.shape)} and dtype {x.dtype}",
                "(rows + 1,) of int32: where each row begins, and the number of tokens",
            )
    if call.cu_seqlens_q.size(0) != call.cu_seqlens_k.size(0):
        raise _wrong(
            f"{call.cu_seqlens_q.size(0) - 1} rows of queries and {call.cu_seqlens_k.size(0) - 1} rows of keys",
            "as many of one as of the other; a row may be empty",
        )
    if call.bias is not None:
        _check_bias(query, key, call.bias, call)
    rule, seed, sinks = call.rule, call.seed, call.sinks
    if sinks is not None and (sinks.shape not in (query.shape[1:2], query.shape[:2]) or not sinks.is_floating_point()):
        raise _wrong(
            f"sinks of shape {tuple(sinks.shape)} and dtype {sinks.dtype}",
            f"({query.size(1)},) or {tuple(query.shape[:2])}, floating: one a head, or one a query and head",
        )
    if seed is not None and (seed.dim() != 0 or seed.dtype != torch.int64):
        raise _wrong(f"seed of shape {tuple(seed.shape)} and dtype {seed.dtype}", "() of int64")
    if not 0.0 <= rule.dropout_p < 1.0:
        raise _wrong(f"dropout_p {rule.dropout_p}", "a number in [0, 1)")
    if not rule.softcap >= 0.0:
        raise _wrong(f"softcap {rule.softcap}", "a positive number, or 0 for none")
    if rule.window_left < -1 or rule.window_right < -1:
        raise _wrong(
            f"a window of ({rule.window_left}, {rule.window_right})",
            "numbers of keys before and after a query's own index, or -1 for no limit",
        )


def _check_bias(query: Tensor, key: Tensor, bias: Tensor, call: Call) -> None:
    rows, heads = call.cu_seqlens_q.size(0) - 1, query.size(1)
    if (
        bias.dim() != 4
        or not bias.is_floating_point()
        or bias.size(0) not in (1, rows)
        or bias.size(1) not in (1, heads)
    ):
        raise _wrong(
            f"bias of shape {tuple(bias.shape)} and dtype {bias.dtype}",
            f"a floating (1 or {rows}, 1 or {heads}, positions_q or 1, positions_k or 1)",
        )
    for name, x, tokens, dim, longest in (
        ("positions_q", call.positions_q, query.size(0), 2, call.max_q),
        ("positions_k", call.positions_k, key.size(0), 3, call.max_k),
    ):
        if x is not None and (x.dim() != 1 or x.size(0) != tokens or x.dtype != torch.int64):
            raise _wrong(
                f"{name} of shape {tuple(x.shape)} and dtype {x.dtype}",
                f"({tokens},) of int64: the position of each token in the bias",
            )
        if x is None and 1 < bias.size(dim) < longest:
            raise _wrong(
                f"bias of shape {tuple(bias.shape)} and rows of {longest} tokens",
                f"at least {longest} in its dimension {dim}, or {name}",
            )


def _wrong(found: str, expected: str) -> ValueError:
    return ValueError(f"varlen_attention: found {found}; expected {expected}")


def _forward_by(form: Any) -> Any:
    """Return the forward's kernel of one form. Dynamo is kept out of it when a graph runs."""

    @disable_dynamo
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **rule: Any) -> tuple[Tensor, Tensor]:
        call = _call(*rest, **rule)
        output, logsumexp = form.forward(query, key, value, call)
        return (output, logsumexp) if call.sinks is None else _with_sinks(output, logsumexp, call.sinks)

    return forward


def _with_sinks(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and logsumexp of attention whose softmax counts a sink beside the keys."""
    whole = torch.logaddexp(logsumexp, _by_head(sinks, logsumexp.dtype))
    share = torch.exp(logsumexp - whole).t().unsqueeze(-1)  # (tokens_q, heads_q, 1), of the keys
    return (output * share).to(output.dtype), whole


def _by_head(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sinks as (heads_q, tokens_q or 1)."""
    return sinks.to(dtype).t() if sinks.dim() == 2 else sinks.to(dtype).unsqueeze(1)


def _grad_sinks(saved: Saved, grad_output: Tensor) -> Tensor:
    """Return the gradient of the sinks: the probability of a sink times minus the mean gradient of its query."""
    sinks = saved.call.sinks
    if sinks is None:
        return saved.query.new_empty(0)
    probabilities = torch.exp(_by_head(sinks, saved.logsumexp.dtype) - saved.logsumexp)
    means = (grad_output.to(probabilities.dtype) * saved.output).sum(-1).t()
    grads = -(probabilities * means)
    return (grads.t() if sinks.dim() == 2 else grads.sum(1)).to(sinks.dtype)


def _backward_by(form: Any) -> Any:
    """Return the backward's kernel of one form, likewise."""

    @disable_dynamo
    def backward(grad_output: Tensor, *rest: Any, bias_gradient: bool = False, **rule: Any) -> tuple[Tensor, ...]:
        saved = _saved(*rest, **rule)
        return *form.backward(saved, grad_output, bias_gradient), _grad_sinks(saved, grad_output)

    return backward


def _call(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *rest: Any, **rule: Any) -> Call:
    """Return the arguments behind query, key and value. The dispatcher leaves out the last ones that are defaults."""
    return Call(cu_seqlens_q, cu_seqlens_k, max_q, max_k, Rule(**rule), *rest)


def _saved(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, *rest: Any, **rule: Any
) -> Saved:
    return Saved(query, key, value, output, logsumexp, _call(*rest, **rule))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty(query.size(0), query.size(1), value.size(2))
    statistics = query.new_empty(query.size(1), query.size(0), dtype=statistics_dtype(query.dtype))
    return output, statistics


def _backward_fake(grad_output: Tensor, *rest: Any, bias_gradient: bool = False, **rule: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, call = _saved(*rest, **rule)
    grad_bias = query.new_empty(0)
    if bias_gradient:
        assert call.bias is not None
        grad_bias = call.bias.new_empty(call.bias.shape)
    grad_sinks = query.new_empty(0) if call.sinks is None else call.sinks.new_empty(call.sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), grad_bias, grad_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens_q, cu_seqlens_k, *rest)
    ctx.mark_non_differentiable(output[1])
    ctx.longest = (max_q, max_k)
    ctx.rule = keyword_only_inputs


def _backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, rest = saved[:7], saved[7:]  # up to cu_seqlens_k; from the bias on
    # The dispatcher omits trailing arguments that have their default value, so there may be no entry for the bias.
    bias_gradient = any(ctx.needs_input_grad[7:8])
    *grads, grad_bias, grad_sinks = torch.ops.deepytorch.varlen_attention_backward.default(
        grad_output, *tensors, *ctx.longest, *rest, bias_gradient=bias_gradient, **ctx.rule
    )
    starts_to_max_k, positions_and_seed = (None,) * 4, (None,) * 3
    has_sinks = rest[4:] and rest[4] is not None
    return (
        *grads,
        *starts_to_max_k,
        grad_bias if bias_gradient else None,
        *positions_and_seed,
        grad_sinks if has_sinks else None,
    )


def _setup_backward_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    grad_output, query, key, value, _, _, cu_seqlens_q, cu_seqlens_k, _, _, *rest = inputs
    ctx.save_for_backward(grad_output, query, key, value, cu_seqlens_q, cu_seqlens_k, *rest)
    ctx.rule = {name: setting for name, setting in keyword_only_inputs.items() if name != "bias_gradient"}
    ctx.bias_gradient = keyword_only_inputs.get("bias_gradient", False)


def _backward_of_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return second derivatives, of the operator's meaning in plain torch: slow, but rarely needed."""
    saved: list[Any] = [*ctx.saved_tensors, None, None, None, None, None]
    grad_output, query, key, value, cu_seqlens_q, cu_seqlens_k, bias, positions_q, positions_k, seed, sinks, *_ = saved

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
        return varlen_attention_reference(
            query, key, value, cu_seqlens_q, cu_seqlens_k,
            bias=bias, positions_q=positions_q, positions_k=positions_k, seed=seed, sinks=sinks, rule=Rule(**ctx.rule),
        )  # fmt: skip

    wants = (True, True, True, ctx.bias_gradient, sinks is not None)
    given = (query, key, value, bias, sinks)
    *inputs, grad_bias, grad_sinks = second_derivatives(attention, grad_output, given, wants, gradients)
    output_to_max_k = (None,) * 6  # output and logsumexp are functions of the inputs that are differentiated here
    positions_and_seed = (None,) * 3
    return *inputs, *output_to_max_k, grad_bias, *positions_and_seed, grad_sinks


def _autocast(device_type: str, dispatch_key: str) -> Any:
    """Return a kernel that casts query, key and value as `scaled_dot_product_attention` does under autocast."""
    key_set = DispatchKeySet(getattr(DispatchKey, dispatch_key))

    def cast(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **rule: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        with ExcludeDispatchKeyGuard(key_set):
            return torch.ops.deepytorch.varlen_attention.default(query, key, value, *rest, **rule)

    return cast


def _flops(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **_: Any) -> int:
    """Return the operations of a forward whose rows are all as long as the longest: lengths are on the device."""
    (tokens, heads, dim), max_k = query, args[3]
    return int(2 * tokens * max_k * heads * (dim + value[2]))


def _backward_flops(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **_: Any
) -> int:
    """Return the operations of a backward: five products for the two of a forward."""
    return 5 * _flops(query, key, value, *args[2:]) // 2


_FORMS = {"CPU": cpu, "CUDA": cuda, "CompositeExplicitAutograd": dense}  # the last: every other device
register(
    _FORWARD,
    {key: _forward_by(form) for key, form in _FORMS.items()}
    | {"AutocastCPU": _autocast("cpu", "AutocastCPU"), "AutocastCUDA": _autocast("cuda", "AutocastCUDA")},
    _forward_fake,
    _backward,
    _setup_context,
    flops=_flops,
)
register(
    _BACKWARD,
    {key: _backward_by(form) for key, form in _FORMS.items()},
    _backward_fake,
    _backward_of_backward,
    _setup_backward_context,
    flops=_backward_flops,
)
