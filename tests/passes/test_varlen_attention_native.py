"""Attention of packed rows by our C++ on a CPU: right, the same bits whatever surrounds it, and used when it may be."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepytorch import background
from deepytorch.passes.ops import native as availability
from deepytorch.passes.ops import varlen_attention_cpu as cpu
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.native import Kernels, can_run, native
from deepytorch.passes.ops.reference import varlen_attention_reference

pytestmark = pytest.mark.skipif(not can_run(), reason="needs x86-64 with AVX2, on Linux")
FULL, CAUSAL = (-1, -1), (-1, 0)


@pytest.fixture(scope="module")
def kernels() -> Any:
    found = native.load()
    assert found is not None, native.failed()
    assert found.varlen_attention_is_supported()
    return found


def call_of(lengths_q: list[int], lengths_k: list[int] | None = None, window: tuple[int, int] = CAUSAL) -> Call:
    lengths = lengths_q, lengths_k or lengths_q
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in lengths]
    longest = [max(each, default=0) for each in lengths]
    return Call(*starts, *longest, Rule(0.3, *window))


def tensors(call: Call, heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (16, 16)) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    (heads_q, heads_k), (dim, dim_v) = heads, dims
    tokens_q, tokens_k = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_k[-1])
    shapes = [
        (tokens_q, heads_q, dim),
        (tokens_k, heads_k, dim),
        (tokens_k, heads_k, dim_v),
        (tokens_q, heads_q, dim_v),
    ]
    return [torch.randn(shape) for shape in shapes]


def run(given: list[Tensor], call: Call) -> list[Tensor]:
    """Output, logsumexp and the gradients of query, key and value, by the form that is chosen."""
    q, k, v, grad = given
    output, logsumexp = cpu.forward(q, k, v, call)
    return [output, logsumexp, *cpu.backward(Saved(q, k, v, output, logsumexp, call), grad, False)[:3]]


def exact(given: list[Tensor], call: Call) -> list[Tensor]:
    """Output and gradients in float64."""
    q, k, v, grad = (x.double() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = varlen_attention_reference(*leaves, call.cu_seqlens_q, call.cu_seqlens_k, rule=call.rule)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad, materialize_grads=True, allow_unused=True)]


class Counted:
    """Stands where the kernels are kept; counts who took them."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.taken = 0

    def get(self) -> Any:
        self.taken += 1
        return self.kernels


@pytest.fixture
def counted(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted(kernels)
    monkeypatch.setattr(cpu, "KERNELS", found)
    return found


EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
CASES = {
    "edges": (EDGES, None, (2, 2), (16, 16)),
    "odd dims": ([65, 7, 0, 130], None, (2, 2), (17, 5)),
    "wide": ([70, 1, 200], None, (2, 2), (128, 80)),
    "one dim": ([70, 20], None, (2, 2), (1, 1)),
    "grouped": ([65, 7, 0, 130], None, (6, 2), (32, 32)),
    "one key head": ([65, 7, 0, 130], None, (4, 1), (24, 40)),
    "more keys": ([3, 64, 0, 70, 5], [80, 65, 9, 200, 0], (4, 2), (16, 8)),
    "fewer keys": ([80, 65, 9, 200, 5], [3, 64, 0, 70, 6], (4, 2), (16, 8)),
    "several tasks": ([700], None, (2, 1), (16, 16)),
}


@pytest.mark.parametrize("window", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_as_close_to_exact_as_torch(
    case: str, window: tuple[int, int], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths_q, lengths_k, heads, dims = CASES[case]
    call = call_of(lengths_q, lengths_k, window)
    given = tensors(call, heads, dims)
    ours, expected = run(given, call), exact(given, call)
    assert counted.taken == 2
    monkeypatch.setattr(cpu, "KERNELS", Counted(None))
    stock = run(given, call)
    torch.testing.assert_close(ours[1], stock[1], rtol=2e-6, atol=2e-6)  # logsumexp
    del ours[1], stock[1]
    for name, mine, theirs, right in zip(("output", "q", "k", "v"), ours, stock, expected, strict=True):
        assert mine.dtype == torch.float32
        assert mine.is_contiguous()
        scale = right.abs().max().item() if right.numel() else 0.0
        distance, stocks = ((x - right).square().mean().sqrt().item() if x.numel() else 0.0 for x in (mine, theirs))
        assert distance <= 2 * stocks + 1e-7 * scale, (name, distance, stocks)


def test_queries_and_keys_without_a_partner_get_zeros(counted: Counted) -> None:
    call = call_of([3, 5, 0, 2], [4, 0, 6, 2], FULL)
    given = [torch.cat([x, torch.ones(2, *x.shape[1:])]) for x in tensors(call)]  # and two tokens that are in no row
    output, logsumexp, grad_q, grad_k, grad_v = run(given, call)
    assert counted.taken == 2
    lonely_q, lonely_k = [3, 4, 5, 6, 7, 10, 11], [4, 5, 6, 7, 8, 9, 12, 13]
    for x, lonely in ((output, lonely_q), (grad_q, lonely_q), (grad_k, lonely_k), (grad_v, lonely_k)):
        assert [index for index in range(x.size(0)) if not x[index].any()] == lonely
    assert [index for index in range(12) if logsumexp[0, index] == float("-inf")] == lonely_q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tensors_are_computed_in_float32(
    dtype: torch.dtype, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_HALF_UNITS", {dtype: lambda: False})
    call = call_of([70, 3])
    given = [x.to(dtype) for x in tensors(call)]
    found = run(given, call)
    wide = run([x.float() for x in given], call)
    assert counted.taken == 4
    assert torch.equal(found[0], wide[0].to(dtype))
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype]
    # the backward is given the output as it was rounded
    for narrow, full in zip(found[2:], wide[2:], strict=True):
        torch.testing.assert_close(narrow.float(), full, rtol=0.02, atol=0.02)


def test_any_strides(counted: Counted) -> None:
    call = call_of([70, 3, 17])
    given = tensors(call)
    expected = run(given, call)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]  # heads first
    inside = [torch.randn(x.size(0), x.size(1), 3 * x.size(2))[..., : x.size(2)].copy_(x) for x in given]
    last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]  # the last dimension is not dense
    for other in (turned, inside, last):
        for one, two in zip(run(other, call), expected, strict=True):
            assert torch.equal(one, two)
    assert counted.taken == 8


def test_the_same_bits_alone_or_in_a_batch_and_with_any_number_of_threads(counted: Counted) -> None:
    lengths = [300, 5, 64, 1, 129]
    call = call_of(lengths)
    given = tensors(call, (4, 2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(given, call)
        torch.set_num_threads(4)
        for _ in range(3):
            assert all(torch.equal(one, two) for one, two in zip(run(given, call), expected, strict=True))
    finally:
        torch.set_num_threads(threads)
    for first, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
        alone = run([x[first : first + length] for x in given], call_of([length]))
        for name, one, two in zip(("output", "logsumexp", "q", "k", "v"), alone, expected, strict=True):
            assert torch.equal(one, two.narrow(int(name == "logsumexp"), first, length)), (name, length)


def test_no_row_sees_another_and_no_query_a_later_key(counted: Counted) -> None:
    call = call_of([100, 70, 30])
    given = tensors(call)
    before = run(given, call)
    with_other = [x.clone() for x in given]
    for x in with_other[1:3]:
        x[150] = 7.0  # the key that is number 50 of the second row
    after = run(with_other, call)
    changed = (after[0] != before[0]).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == list(range(150, 170))
    assert (after[2] != before[2]).flatten(1).any(1).nonzero().flatten().tolist() == list(range(150, 170))
    grads = (after[3] != before[3]).flatten(1).any(1).nonzero().flatten()
    assert grads.min() >= 100
    assert grads.max() < 170


@pytest.mark.parametrize("window", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(value: float, window: tuple[int, int], counted: Counted) -> None:
    row, token = range(20, 90), 60
    for index, name in enumerate(("query", "key", "value", "gradient")):
        call = call_of([20, 70, 9], window=window)
        given = tensors(call)
        given[index][token] = value
        # who must not be finite: queries that saw it, and the keys that those see
        queries = range(token, token + 1) if name in ("query", "gradient") else row if window is FULL else row[40:]
        keys = row if window is FULL else range(20, queries.stop)
        must = {
            "output": [] if name == "gradient" else queries,
            "grad_query": queries,
            "grad_key": keys,
            "grad_value": [] if name == "value" else keys,
        }
        output, _, *grads = run(given, call)
        for found, (which, tokens) in zip((output, *grads), must.items(), strict=True):
            finite = found.isfinite().flatten(1).all(1)
            assert finite[:20].all(), (name, which)
            assert finite[90:].all(), (name, which)
            assert not finite[list(tokens)].any(), (name, which)


def test_keys_that_cannot_be_seen_count_nothing(counted: Counted) -> None:
    call = call_of([3], window=FULL)
    given = tensors(call)
    given[0][:], given[1][:2], given[1][2:] = 10.0, 1.0, -1.0  # the last key lies 2 * 16 * 10 * 0.3 lower
    given[2][2] = 1e38
    torch.testing.assert_close(run(given, call)[0], given[2][:2].mean(0).expand(3, -1, -1))


def test_no_tokens_and_dimensions_of_one(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {
        "no row": (call_of([]), tensors(call_of([]))),
        "no token": (call_of([0, 0]), [x.expand(0, 2, 16) for x in torch.ones(4, 1, 2, 16)]),
        "one of each": (call_of([1]), [x.expand(1, 1, 1) for x in torch.randn(4, 1, 1, 1)]),
        "dim of one": (call_of([9]), [torch.randn(9, 1, 2).transpose(1, 2) for _ in range(4)]),
    }
    for name, (call, given) in odd.items():
        found = run(given, call)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "KERNELS", Counted(None))
            for mine, right in zip(found, run(given, call), strict=True):
                torch.testing.assert_close(mine, right, msg=name)


def test_where_less_than_float32_will_do_torch_computes(counted: Counted) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        run(tensors(call_of([40])), call_of([40]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert counted.taken == 0


def test_scores_far_from_zero(counted: Counted) -> None:
    call = call_of([70, 3])
    given = tensors(call)
    given[0] *= 300.0  # softmax of scores in the thousands: one key has it all
    found, expected = run(given, call), exact(given, call)
    torch.testing.assert_close(found[0], expected[0].float(), rtol=1e-3, atol=1e-3)
    assert found[1].abs().max() > 500
    # and all alike, however far: the softmax is even
    given[1][:] = 0.0
    given[0] *= 1e6
    even = given[2].narrow(0, 70, 3)[:, 0].cumsum(0) / torch.arange(1, 4).unsqueeze(1)
    torch.testing.assert_close(run(given, call)[0][70:, 0], even)


PLAIN = (Rule(0.3), {}, torch.float32)
DECLINED = {
    "window": (Rule(0.3, 5, 0), {}, torch.float32),
    "keys to come": (Rule(0.3, -1, 2), {}, torch.float32),
    "dropout": (Rule(0.3, -1, 0, 0.5), {"seed": torch.tensor(3)}, torch.float32),
    "softcap": (Rule(0.3, -1, 0, 0.0, 20.0), {}, torch.float32),
    "bias": (Rule(0.3), {"bias": torch.zeros(1, 1, 1, 1)}, torch.float32),
    "float64": (Rule(0.3), {}, torch.float64),
}
TAKEN = {
    "full": PLAIN,
    "causal": (Rule(0.3, -1, 0), {}, torch.float32),
    "a window as wide as the rows": (Rule(0.3, 39, 39), {}, torch.float32),
    "causal with one": (Rule(0.3, 39, 0), {}, torch.float32),
}


@pytest.mark.parametrize("case", [*DECLINED, *TAKEN])
def test_takes_plain_calls_alone(case: str, counted: Counted) -> None:
    rule, extras, dtype = {**DECLINED, **TAKEN}[case]
    call = call_of([40, 3])._replace(rule=rule, **extras)
    given = [x.to(dtype) for x in tensors(call)]
    found = run(given, call)
    assert counted.taken == (2 if case in TAKEN else 0)
    if rule.dropout_p == 0:
        expected = varlen_attention_reference(
            *(x.double() for x in given[:3]), call.cu_seqlens_q, call.cu_seqlens_k, bias=call.bias, rule=rule
        )
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_longer_rows_than_its_tiles_are_made_for_go_to_torch(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MOST_KEYS", 40)
    run(tensors(call_of([40])), call_of([40]))
    assert counted.taken == 2
    run(tensors(call_of([41])), call_of([41]))
    assert counted.taken == 2


def test_rows_that_do_not_fit_are_refused(kernels: Any) -> None:
    q, k, v, _ = tensors(call_of([5, 4]))
    for starts in ([0, 5, 10], [0, 6, 4], [0, -1, 9]):
        rows = torch.tensor(starts, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="varlen_attention: found rows"):
            kernels.varlen_attention(q, k, v, rows, rows, 0.3, False)


# ---------------------------------------------------------------------- when it is there


class Stand:
    """Stands for `native`: says what it is told to, and remembers what it was asked for."""

    def __init__(self, built: bool = False, failure: str | None = None, supported: bool = True) -> None:
        self.built, self.failure, self.supported = built, failure, supported
        self.asked: list[str] = []
        self.compiles = True

    def builds_in_background(self) -> bool:
        return self.compiles

    def is_built(self) -> bool:
        return self.built

    def failed(self) -> str | None:
        return self.failure

    def build_in_background(self) -> None:
        self.asked.append("build")

    def load(self) -> Any:
        self.asked.append("load")
        return self

    def varlen_attention_is_supported(self) -> bool:
        return self.supported


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, as `Kernels` reads them; nothing waits for a compiler, and none is at work."""
    now = [1000.0]
    monkeypatch.setattr(availability.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "background")
    monkeypatch.setattr(background, "is_working", lambda: False)
    return now


def stand(monkeypatch: pytest.MonkeyPatch, **what: Any) -> Stand:
    found = Stand(**what)
    monkeypatch.setattr(availability, "native", found)
    return found


def test_what_is_built_is_used_at_once(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    there, kernels = stand(monkeypatch, built=True), Kernels()
    assert kernels.get() is there
    assert kernels.get() is there
    assert there.asked == ["load"]


def test_a_short_run_compiles_nothing_and_a_long_one_beside(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, kernels = stand(monkeypatch), Kernels()
    for clock[0] in range(1000, 1060):
        assert kernels.get() is None
    assert there.asked == []
    clock[0] = 1060.0
    assert kernels.get() is None
    assert there.asked == ["build"]
    there.built = True
    assert kernels.get() is None  # it does not look all the time
    clock[0] = 1061.5
    assert kernels.get() is there


def test_graphs_are_compiled_first(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    there, kernels = stand(monkeypatch), Kernels()
    kernels.get()
    monkeypatch.setattr(background, "is_working", lambda: True)
    clock[0] = 1100.0
    kernels.get()
    assert there.asked == []
    monkeypatch.setattr(background, "is_working", lambda: False)
    clock[0] = 1102.0
    kernels.get()
    assert there.asked == ["build"]


def test_a_process_that_leaves_nothing_behind_is_not_started_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, kernels = stand(monkeypatch), Kernels()
    for clock[0] in (1000.0, 1100.0, 1200.0):
        kernels.get()
    there.compiles = False  # it was killed, or may not write
    for clock[0] in (1300.0, 1400.0, 1500.0):
        assert kernels.get() is None
    assert there.asked == ["build"]


def test_what_did_not_compile_is_not_tried_again(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    there, kernels = stand(monkeypatch, failure="no compiler"), Kernels()
    for clock[0] in (1000.0, 1100.0, 1200.0):
        assert kernels.get() is None
    assert there.asked == []


def test_a_cpu_without_small_products_stays_on_torch(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    there, kernels = stand(monkeypatch, built=True, supported=False), Kernels()
    for clock[0] in (1000.0, 1100.0):
        assert kernels.get() is None
    assert there.asked == ["load"]


def test_steps_that_wait_for_what_they_need_wait_for_it(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "wait")
    there, kernels = stand(monkeypatch), Kernels()
    assert kernels.get() is there
    assert there.asked == ["load"]


def test_another_cpu_has_none(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.platform, "machine", lambda: "aarch64")
    there, kernels = stand(monkeypatch, built=True), Kernels()
    assert kernels.get() is None
    assert there.asked == []


SCRIPT = """
import sys, time
import torch
from deepytorch.passes.ops import native, varlen_attention_cpu as cpu
from deepytorch.passes.ops.attention_tile import Call, Rule
native._PATIENCE_SECONDS = 0.0
torch.manual_seed(0)
starts = torch.tensor([0, 5, 75], dtype=torch.int32)
call = Call(starts, starts, 70, 70, Rule(0.3, -1, 0))
q, k, v = (torch.randn(75, 2, 16) for _ in range(3))
first, _ = cpu.forward(q, k, v, call)
assert native.KERNELS.get() is None  # nothing has waited
deadline = time.monotonic() + 300
while native.KERNELS.get() is None and time.monotonic() < deadline:
    time.sleep(0.2)
assert native.KERNELS.get() is not None, native.native.failed()
later, _ = cpu.forward(q, k, v, call)
torch.testing.assert_close(first, later, rtol=1e-5, atol=1e-6)
sys.stdout.write("went over")
"""


@pytest.mark.slow  # compiles the C++
def test_a_run_goes_over_when_another_process_has_compiled(tmp_path: Path) -> None:
    (tmp_path / "xdg").mkdir(mode=0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg"), "DEEPYTORCH_COMPILE": "background"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout == "went over", (done.stderr[-3000:], time.monotonic() - begun)
