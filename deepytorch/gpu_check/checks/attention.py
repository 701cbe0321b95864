"""Attention over packed rows against its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepytorch.bench.training_step import DTYPES
from deepytorch.gpu_check.nearness import as_near
from deepytorch.gpu_check.outcome import Check, Skipped
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.reference import varlen_attention_reference
from deepytorch.passes.ops.varlen_attention import varlen_attention

KINDS: dict[str, dict[str, Any]] = {
    "causal": {"window_right": 0},
    "both ways": {},
    "window": {"window_left": 17, "window_right": 0},
    "dropout": {"window_right": 0, "dropout_p": 0.1},
    "bias": {"bias": True},
}


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject; bf16, which most train in, comes first."""
    for dtype in ("bf16", "fp32", "fp16"):
        for name, options in KINDS.items():
            run = partial(attention_is_right, device, dtype, options)
            yield Check(f"attention: {dtype}", f"{dtype}, {name}", run, expected_s=12.0)
    for dtype in ("bf16", "fp16"):
        run = partial(biased_wide_heads, device, dtype)
        yield Check("attention: held back from Triton", f"{dtype}, heads of 256 with a bias", run, expected_s=12.0)


def attention_is_right(device: torch.device, dtype: str, options: dict[str, Any]) -> str:
    """Compare the output and the gradients with the reference in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 37, 130, 64, 5]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    shapes = [(sum(lengths), heads, 64) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    options = dict(options)
    biased = options.pop("bias", False)
    bias = torch.randn(1, 4, 1, max(lengths), generator=generator) if biased else None
    seed = torch.tensor(7, device=device) if options.get("dropout_p") else None
    rule = Rule(**{"scale": 0.125, "window_left": -1, "window_right": -1, "dropout_p": 0.0, "softcap": 0.0, **options})

    def of(call: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [each.to(device, kind).requires_grad_() for each in given]
        output = call(*leaves, None if bias is None else bias.to(device, kind))
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    def reference(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> Tensor:
        return varlen_attention_reference(query, key, value, starts, starts, bias=added, seed=seed, rule=rule)

    def operator(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> Tensor:
        longest = max(lengths)
        return varlen_attention(
            query, key, value, starts, starts, longest, longest, bias=added, seed=seed, scale=0.125, **options
        )

    exact, eager = of(reference, torch.float64), of(reference, DTYPES[dtype])
    ours = of(operator, DTYPES[dtype])
    return as_near(("output", "query", "key", "value"), exact, eager, ours, DTYPES[dtype])


def biased_wide_heads(device: torch.device, dtype: str) -> str:
    """Check each output of kernels that `varlen_attention_triton.why_not_triton` refuses until this check passes."""
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    from deepytorch.passes.ops import varlen_attention_triton as triton_form

    generator = torch.Generator().manual_seed(0)
    lengths, dim, kind = [300, 1, 77], 256, DTYPES[dtype]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    shapes = [(sum(lengths), heads, dim) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=generator).to(device, kind) for shape in shapes]
    given.append(torch.randn(1, 4, max(lengths), max(lengths), generator=generator).to(device))
    upstream = torch.randn(shapes[0], generator=generator).to(device, kind)
    rule = Rule(0.1, -1, 0)

    def reference(to: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(torch.promote_types(each.dtype, to)).requires_grad_() for each in given]
        query, key, value, bias = leaves
        output = varlen_attention_reference(query, key, value, starts, starts, bias=bias, rule=rule)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]

    query, key, value, bias = given
    call = Call(starts, starts, max(lengths), max(lengths), rule, bias)
    output, logsumexp = triton_form.forward(query, key, value, call)
    ours = [output, *triton_form.backward(Saved(query, key, value, output, logsumexp, call), upstream, True)]
    names = ("output", "query", "key", "value", "bias")
    return as_near(names, reference(torch.float64), reference(kind), ours, kind)
