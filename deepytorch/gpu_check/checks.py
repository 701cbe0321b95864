"""The checks of `deepytorch gpu-check`: kernels and training are right on a GPU, and how fast they are."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch import paused
from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.training_step import DTYPES, Precision, compiled_arm, to_device
from deepytorch.data import text_batches
from deepytorch.gpu_check.outcome import Check, Failed, Skipped
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.passes.ops.linear_cross_entropy_chunked import LossRule
from deepytorch.passes.ops.pack_facts import Packing, Target, pack_facts, takes
from deepytorch.passes.ops.reference import (
    linear_cross_entropy_reference,
    pack_facts_reference,
    varlen_attention_reference,
)
from deepytorch.passes.ops.varlen_attention import varlen_attention
from deepytorch.torch_internals import reset_dynamo

_MODELS = ("llama", "bert", "t5")
_OF_EAGERS = 3.0  # allowed error, in multiples of eager's error in that dtype: the rule of PyTorch's own benchmarks
_SLACK = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the norm of the exact values
_COMPILES_S = 180.0  # for a check with a model that Inductor compiles
_MANY_S = 240.0  # for a check with many compiles, or many ranks


def checks_on(device: str) -> list[Check]:
    """Return every check on `device`, by group: cheap checks that decide most come first."""
    return list(_checks(torch.device(device)))


def _checks(device: torch.device) -> Iterator[Check]:
    for dtype in DTYPES:
        for name, options in _LOSSES.items():
            yield Check("linear + cross-entropy", f"{dtype}, {name}", partial(_loss_is_right, device, dtype, options))
    for dtype in DTYPES:
        for name, options in _ATTENTIONS.items():
            group = "attention" if dtype == "bf16" else f"attention in {dtype}"
            yield Check(group, f"{dtype}, {name}", partial(_attention_is_right, device, dtype, options))
    for dtype in ("bf16", "fp16"):
        run = partial(_biased_wide_heads, device, dtype)
        yield Check("attention that is held back from Triton", f"{dtype}, heads of 256 with a bias", run)
    for size in ((5, 61), (37, 701)):  # in one launch and in two
        yield Check("facts of a batch", f"{size[0]} rows of {size[1]}", partial(_facts_are_right, device, size))
    for model in _MODELS:
        for dtype in ("fp32", "bf16"):
            run = partial(_trains_as_eager, device, model, dtype)
            yield Check(f"parity of {model}", f"{dtype}, Inductor", run, deadline_s=_COMPILES_S)
    yield Check("synchronisations", "a packed step", partial(_synchronisations, device), deadline_s=_COMPILES_S)
    yield Check("ranks of one GPU", "4 ranks, all-reduces", partial(_ranks_of_one_gpu, device), deadline_s=_MANY_S)
    yield Check("registered memory", "NCCL with one rank", partial(_registered_memory, device))
    yield Check("machine code", "every kernel, for this device", partial(_machine_code, device), deadline_s=_MANY_S)
    for name, speed in (
        ("linear + cross-entropy, 4096 x 4096 x 128256, bf16", _loss_speed),
        ("attention, 8 rows of 1024, 32 heads of 128, bf16", _attention_speed),
        ("bench unpad, llama base, bf16", _unpad_speed),
    ):
        yield Check("speed", name, partial(speed, device), quick=False, is_timed=True, deadline_s=_MANY_S)


# ------------------------------------------------------------------ kernels


def _machine_code(device: torch.device) -> str:
    from deepytorch.bench.kernels import Kernels, KernelsOptions, faults
    from deepytorch.bench.run import run_benchmark
    from deepytorch.machine_code import CAPABILITIES

    if device.type != "cuda":
        raise Skipped("no CUDA device; `deepytorch bench kernels` compiles for some without one")
    major, minor = torch.cuda.get_device_capability(device)
    nearest = max((each for each in CAPABILITIES if each <= 10 * major + minor), default=None)
    if nearest is None:
        raise Skipped(f"compute capability {major}.{minor}; kernels are for 8.0 and newer")
    results = run_benchmark(Kernels(), KernelsOptions(capabilities=(nearest,)))
    if wrong := faults(results):
        raise Failed("; ".join(wrong))
    return f"{len(results.rows)} variants for sm_{nearest}"


_LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, smoothed": {"reduction": 2, "label_smoothing": 0.1},
    "softcap": {"softcap": 30.0},
}
_ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": {"window_right": 0},
    "both ways": {},
    "window": {"window_left": 17, "window_right": 0},
    "dropout": {"window_right": 0, "dropout_p": 0.1},
    "bias": {"bias": True},
}


def _loss_is_right(device: torch.device, dtype: str, options: dict[str, Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    rows, size, classes = 301, 264, 1003
    given = [torch.randn(rows, size, generator=generator), torch.randn(classes, size, generator=generator) * 0.05]
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = -100
    target = target.to(device)
    rule = LossRule(**options)
    named = {**options, "reduction": {1: "mean", 2: "sum"}[rule.reduction]}

    def of(call: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [each.to(device, kind).requires_grad_() for each in given]
        loss = call(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def reference(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy_reference(hidden, weight, None, target, None, rule)

    exact, eager = of(reference, torch.float64), of(reference, DTYPES[dtype])
    ours = of(lambda hidden, weight: linear_cross_entropy(hidden, weight, target, **named), DTYPES[dtype])
    return _as_near(("loss", "gradient of hidden", "gradient of weight"), exact, eager, ours, DTYPES[dtype])


def _attention_is_right(device: torch.device, dtype: str, options: dict[str, Any]) -> str:
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
    return _as_near(("output", "query", "key", "value"), exact, eager, ours, DTYPES[dtype])


def _biased_wide_heads(device: torch.device, dtype: str) -> str:
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
    return _as_near(names, reference(torch.float64), reference(kind), ours, kind)


def _facts_are_right(device: torch.device, size: tuple[int, int]) -> str:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(size, generator=generator) < 0.7
    target = torch.randint(-1, 2, size, generator=generator)
    given = Target(target.to(device), -1)
    if not takes(mask.to(device), "nonzero", given):
        raise Skipped("no CUDA device, or no Triton")
    found, wanted = pack_facts(mask.to(device), "nonzero", given), pack_facts_reference(mask, target != -1)
    for name in Packing.__slots__:
        expected = getattr(wanted, name)
        # Values behind the last index are undefined.
        if not torch.equal(getattr(found, name)[: len(expected)].cpu(), expected):
            raise Failed(f"{name} differs from the reference")
    return f"{int(wanted.counts[0].sum())} tokens where they are"


def _as_near(
    names: tuple[str, ...], exact: list[Tensor], eager: list[Tensor], ours: list[Tensor], dtype: torch.dtype
) -> str:
    """Raise `Failed` if ours is further from the exact values than `_OF_EAGERS` times eager, plus `_SLACK`."""
    worst = 0.0
    for name, wanted, theirs, found in zip(names, exact, eager, ours, strict=True):
        wanted = wanted.double()
        off, allowed = (found.double() - wanted).norm(), (theirs.double() - wanted).norm()
        limit = _OF_EAGERS * allowed + _SLACK[dtype] * wanted.norm()
        if not bool(off <= limit):
            raise Failed(f"{name} is off by {off:.3g}; {limit:.3g} allowed, eager is off by {allowed:.3g}")
        worst = max(worst, float(off / wanted.norm()))
    return f"off by {worst:.1e} at most"


# ------------------------------------------------------------------ models


def _few_batches(model: str, device: torch.device, steps: int, size: int = 8) -> list[dict[str, Tensor]]:
    drawn = text_batches(None, 512, batch_size=size, max_length=256, kind=batch_kind(model), steps=steps)
    return [to_device(batch, device) for batch in drawn]


def _trains_as_eager(device: torch.device, model: str, dtype: str) -> str:
    """Compare losses and final weights of three steps of SGD: in float32, in `dtype`, and in `dtype` by deepytorch."""
    reset_dynamo()
    start: nn.Module = build_model(model, "tiny", vocab_size=512, seed=0)
    data = _few_batches(model, device, 3)
    with paused():
        exact = _trained(copy.deepcopy(start).to(device), data, torch.float32, None)
        eager = _trained(copy.deepcopy(start).to(device), data, DTYPES[dtype], None)
    ours = _trained(copy.deepcopy(start).to(device), data, DTYPES[dtype], "deepytorch")
    return _as_near(("losses", "change of the weights"), exact, eager, ours, DTYPES[dtype])


def _trained(model: nn.Module, data: list[dict[str, Tensor]], dtype: torch.dtype, backend: str | None) -> list[Tensor]:
    trainee = Trainee(compiled_arm("", model, backend), torch.optim.SGD(model.parameters(), lr=0.05), data)
    before = [each.detach().clone() for each in model.parameters()]
    precision = Precision(data[0]["input_ids"].device, dtype)
    losses = [trainee.step(batch, precision).float() for batch in data]
    change = [(now.detach() - then).flatten() for now, then in zip(model.parameters(), before, strict=True)]
    return [torch.stack(losses), torch.cat(change)]


def _synchronisations(device: torch.device) -> str:
    """Count the synchronisations of steps after the warm-up, with batches moved by `deepytorch.prefetch`."""
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    from deepytorch import prefetch

    model: nn.Module = build_model("llama", "tiny", vocab_size=512, seed=0)
    model = model.to(device)
    call = torch.compile(model, backend="deepytorch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    counts = []
    for step, batch in enumerate(prefetch(_few_batches("llama", torch.device("cpu"), 12), device)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if step >= 6 else "default")
            try:
                call(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if step >= 6:
            counts.append(sum("synchroniz" in str(each.message).lower() for each in said))
    if statistics.median(counts) > 0:
        raise Failed(f"{counts} synchronisations in the steps after the sixth; expected none")
    return f"{counts} in the steps after the sixth"


def _ranks_of_one_gpu(device: torch.device) -> str:
    """Check all-reduces of ranks that share this GPU and map each other's memory: every dtype, then back to back."""
    from deepytorch.bench.launch import RankError
    from deepytorch.bench.ranks_of_one_gpu import OneGpuPlan, run_one_gpu

    if device.type != "cuda":
        raise Skipped("no CUDA device")
    try:
        found = run_one_gpu(OneGpuPlan(str(device)))
    except RankError as error:
        raise Failed(str(error)) from None
    us = 1e6 * found.seconds / found.calls
    return f"{found.compared} kinds and {found.calls} calls have the right bits, {us:.0f} us a call on one GPU"


def _registered_memory(device: torch.device) -> str:
    """Check memory registered with NCCL: made, summed in, dropped while a part of it is held, and made anew."""
    import torch.distributed as dist

    from deepytorch.comm.group.devices.registered import RegisteredMemory

    if device.type != "cuda" or not dist.is_nccl_available():
        raise Skipped("no CUDA device, or a torch without NCCL")
    place = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    nccl: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    if not nccl.supports_tensor_alloc(place):
        raise Skipped("NCCL offers none on this device")
    memory = RegisteredMemory(nccl, place)
    memory.connect()
    held = []
    for size in (5, 12 << 20, 40 << 20, 5, 12 << 20):
        made = memory.allocate(size)
        nccl.allreduce([made.fill_(3)], dist.AllreduceOptions()).wait()
        if not bool((made == 3).all()):
            raise Failed(f"the sum of one rank's {size} bytes is not what they were")
        held.append(made[: size // 2])
        del made
    if not all(bool((part == 3).all()) for part in held):
        raise Failed("memory that was still held has changed")
    return f"{len(held)} pieces"


# ------------------------------------------------------------------ figures


def _median_ms(call: Callable[[], object], rounds: int = 10) -> float:
    for _ in range(3):
        call()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def _loss_speed(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    rows, size, classes = 4096, 4096, 128_256
    hidden = torch.randn(rows, size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, size, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)

    def ours() -> None:
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))

    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    ms = _median_ms(ours)
    # Memory beyond the inputs and the two gradients, which are as large as the inputs.
    extra = torch.cuda.max_memory_allocated(device) - held - (hidden.nbytes + weight.nbytes)
    rate = 6 * rows * size * classes / ms / 1e9
    return f"{ms:.2f} ms, {rate:.0f} TFLOP/s, {extra / 1e6:.0f} MB beyond inputs and gradients"


def _attention_speed(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    rows, length, heads, size = 8, 1024, 32, 128
    starts = torch.arange(0, rows * length + 1, length, device=device, dtype=torch.int32)
    leaves = [
        torch.randn(rows * length, heads, size, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    bias = torch.randn(1, heads, 1, length, device=device, dtype=torch.bfloat16)
    upstream = torch.randn(rows * length, heads, size, device=device, dtype=torch.bfloat16)
    said = []
    cases: dict[str, dict[str, Any]] = {"flash": {}, "bias": {"bias": bias}, "dropout": {"dropout_p": 0.1}}
    for name, options in cases.items():

        def run(options: dict[str, Any] = options) -> None:
            query, key, value = leaves
            output = varlen_attention(query, key, value, starts, starts, length, length, window_right=0, **options)
            torch.autograd.grad(output, leaves, upstream)

        said.append(f"{name} {_median_ms(run):.2f} ms")
    return ", ".join(said)


def _unpad_speed(device: torch.device) -> str:
    from deepytorch.bench.unpad import OURS, UnpadJob, UnpadOptions, rows_of
    from deepytorch.bench.unpad_steps import measure

    if device.type != "cuda":
        raise Skipped("no CUDA device")
    options = UnpadOptions(size="base", precision="mixed", device=str(device), steps=4, rounds=2)
    found = {str(row.key["setup"]): row.figures for row in rows_of(measure(UnpadJob(options=options)))}
    ours = found.pop(OURS)
    said = ", ".join(f"{figures['ratio']:.2f}x {name}" for name, figures in found.items())
    return (
        f"{said}, of {ours['token_ceiling']:.2f}x that pads take; {ours['steps_packed']:.0f} steps packed, "
        f"{ours['steps_padded']:.0f} padded"
    )
