"""Causal attention over packed rows in bf16, forward and backward: each form of ours, and every rival installed.

Plain, with a bias for each head and key, and with dropout.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepytorch.bench.roofline import Gpu, Work
from deepytorch.gpu_check.figures.timing import OURS, median_ms, memory_may_not_suffice, require_gpu, timed
from deepytorch.gpu_check.outcome import Check, Failed, Found, Skipped
from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops import varlen_attention_efficient as efficient
from deepytorch.passes.ops import varlen_attention_flash as flash
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.reference import varlen_attention_reference
from deepytorch.passes.ops.varlen_attention import varlen_attention

_SUBJECT = "speed of attention"
CASES = ("causal", "bias", "dropout")
_DROPOUT = 0.1
_OFF = 2e-2  # relative, of the output, from that in float32
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Given:
    """Rows of one length with heads, one behind the other, and what a case adds to them."""

    def __init__(self, device: torch.device, case: str) -> None:
        self.rows, self.length, self.heads, self.dim = (8, 1024, 32, 128) if device.type == "cuda" else (2, 32, 2, 16)
        torch.manual_seed(0)
        shape, kind = (self.rows * self.length, self.heads, self.dim), {"device": device, "dtype": torch.bfloat16}
        self.leaves = [torch.randn(shape, **kind).requires_grad_() for _ in range(3)]  # type: ignore[call-overload]
        self.upstream = torch.randn(shape, **kind)  # type: ignore[call-overload]
        self.starts = torch.arange(0, shape[0] + 1, self.length, device=device, dtype=torch.int32)
        self.dropout = _DROPOUT if case == "dropout" else 0.0
        self.bias = torch.randn(1, self.heads, 1, self.length, **kind) if case == "bias" else None  # type: ignore[call-overload]
        self.seed = torch.tensor(7, device=device) if self.dropout else None
        self.device, self.lengths = device, (self.length, self.length)
        self.rule = Rule(self.dim**-0.5, -1, 0, self.dropout, 0.0)

    @property
    def call(self) -> Call:
        """Return the call as a form takes it."""
        return Call(self.starts, self.starts, *self.lengths, self.rule, self.bias, seed=self.seed)

    def padded(self, x: Tensor) -> Tensor:
        """Return (tokens, heads, dim) as (rows, heads, length, dim); the rows are of one length."""
        return x.unflatten(0, (self.rows, self.length)).transpose(1, 2)


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for setup, needs in _SETUPS.items():
        group = f"{_SUBJECT}: {setup}"
        run: Callable[[], str | Found]
        if setup == "flex":
            run = partial(prepare_flex, device)
            yield Check(group, "compiled", run, quick=False, deadline_s=180.0, expected_s=35.0)
        for case in CASES:
            run = partial(timed_attention, device, setup, case)
            yield Check(group, case, run, False, is_timed=True, deadline_s=120.0, expected_s=2.5, needs=needs)


def timed_attention(device: torch.device, setup: str, case: str) -> Found:
    """Time one setup, forward and backward, once its output is near the reference's; dropout draws another one."""
    given = Given(device, case)
    form = _FORMS.get(setup)
    with memory_may_not_suffice(setup):
        step = _step_of_form(given, form()) if form is not None else _step_of(given, _RUNS[setup](given))
        if not given.dropout:
            query, key, value = (each.detach().float() for each in given.leaves)
            bias = None if given.bias is None else given.bias.float()
            starts = (given.starts, given.starts)
            wanted = varlen_attention_reference(query, key, value, *starts, bias=bias, rule=given.rule)
            off = float((step().float() - wanted).norm() / wanted.norm())
            if not off <= _OFF:
                raise Failed(f"the output of {setup} is off by {off:.2g}, relative; {_OFF:g} allowed")
        ms = median_ms(step, device)
    pairs = given.rows * given.heads * given.length * (given.length + 1) // 2
    elements = given.upstream.numel()
    flops = [2.0 * products * pairs * given.dim for products in (2, 5)]
    moved = [2.0 * each * elements for each in (4, 8)]  # query, key, value, output; these, and their gradients

    def limit_s(gpu: Gpu) -> float:
        return sum(Work("", *each, 1).seconds(gpu) for each in zip(flops, moved, strict=True))

    return timed(device, ms, flops=sum(flops), limit_s=limit_s)


def prepare_flex(device: torch.device) -> str:
    """Compile flex attention for each case, which its timed checks find."""
    for case in CASES[:2]:
        given = Given(device, case)
        _step_of(given, _flex(given))()
    return "compiled"


def _step_of(given: Given, run: Run) -> Callable[[], Tensor]:
    def step() -> Tensor:
        output = run(*given.leaves)
        torch.autograd.grad(output, given.leaves, given.upstream)
        return output.detach()

    return step


def _step_of_form(given: Given, form: ModuleType) -> Callable[[], Tensor]:
    query, key, value = (each.detach() for each in given.leaves)
    call = given.call

    def step() -> Tensor:
        output, logsumexp = form.forward(query, key, value, call)
        form.backward(Saved(query, key, value, output, logsumexp, call), given.upstream, False)
        found: Tensor = output
        return found

    reason = _why_not(form, query, key, value, call)
    if reason is not None:
        raise Skipped(reason)
    return step


def _why_not(form: ModuleType, query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
    if form is dense:
        return None
    if query.device.type == "cuda":
        capability = torch.cuda.get_device_capability(query.device)
        if form is flash:
            return flash.why_not_flash(query, value, call, capability)
        if form is efficient:
            return efficient.why_not_efficient(query, key, value, call, capability)
    elif form in (flash, efficient):
        return "no CUDA device"
    found: str | None = form.why_not_triton(query, key, value, call)
    return found


def _triton() -> ModuleType:
    try:
        from deepytorch.passes.ops import varlen_attention_triton
    except ImportError:
        raise Skipped("Triton is not installed") from None
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise Skipped("no CUDA device")
    return varlen_attention_triton


# ------------------------------------------------------------------ setups with an autograd of their own


def _ours(given: Given) -> Run:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rule = given.rule._asdict()
        starts = (given.starts, given.starts, *given.lengths)
        return varlen_attention(query, key, value, *starts, bias=given.bias, seed=given.seed, **rule)

    return run


def _padded(given: Given) -> Run:
    mask = None
    if given.bias is not None:
        causal = torch.ones(given.lengths, dtype=torch.bool, device=given.device).tril()
        mask = given.bias.masked_fill(~causal, float("-inf"))  # (1, heads, length, length)

    def run(*leaves: Tensor) -> Tensor:
        query, key, value = map(given.padded, leaves)
        options: dict[str, Any] = {"attn_mask": mask, "dropout_p": given.dropout, "is_causal": mask is None}
        return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(0, 1)

    return run


def _varlen_of_torch(given: Given) -> Run:
    from torch.nn.attention.varlen import varlen_attn

    _refuse(given, ("causal",))
    causal = (
        {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
    )

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Any = varlen_attn(query, key, value, given.starts, given.starts, *given.lengths, **causal)
        return found[0] if isinstance(found, tuple) else found

    return run


def _flash_attn(given: Given) -> Run:
    from flash_attn import flash_attn_varlen_func

    _refuse(given, ("causal", "dropout"))
    options = {"dropout_p": given.dropout, "causal": True}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = flash_attn_varlen_func(query, key, value, given.starts, given.starts, *given.lengths, **options)
        return found

    return run


def _flex(given: Given) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask

    _refuse(given, ("causal", "bias"))
    tokens, length, bias = given.rows * given.length, given.length, given.bias

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // length == key // length) & (query >= key)

    def biased(score: Tensor, _: Tensor, head: Tensor, __: Tensor, key: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[0, head, 0, key % length]

    mask = create_block_mask(seen, None, None, tokens, tokens, device=str(given.device))
    options: dict[str, Any] = {"block_mask": mask, **({} if bias is None else {"score_mod": biased})}

    def run(*leaves: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in leaves)
        found: Tensor = _compiled_flex()(query, key, value, **options)
        return found[0].transpose(0, 1)

    return run


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _refuse(given: Given, cases: tuple[str, ...]) -> None:
    """Raise `Skipped` for what a rival does not compute."""
    require_gpu(given.device)
    case = "bias" if given.bias is not None else "dropout" if given.dropout else "causal"
    if case not in cases:
        raise Skipped(f"it has no {case}")


_FORMS: dict[str, Callable[[], ModuleType]] = {
    "flash": lambda: flash,
    "Triton": _triton,
    "memory-efficient": lambda: efficient,
    "dense": lambda: dense,
}
_RUNS: dict[str, Callable[[Given], Run]] = {
    OURS: _ours,
    "torch's varlen_attn": _varlen_of_torch,
    "flash-attn": _flash_attn,
    "flex": _flex,
    "padded SDPA": _padded,
}
_SETUPS: dict[str, tuple[str, ...]] = dict.fromkeys((OURS, *_FORMS, *_RUNS), ()) | {"flash-attn": ("flash_attn",)}
