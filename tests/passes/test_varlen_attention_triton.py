"""The Triton form of `varlen_attention`: in Triton's interpreter, on a GPU where there is one, and as machine code."""

import itertools
import math
import os

import pytest
import torch

pytest.importorskip("triton")

from deepytorch.passes.ops import varlen_attention_cuda as cuda
from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops import varlen_attention_triton as form
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.reference import varlen_attention_reference
from deepytorch.passes.ops.varlen_attention import varlen_attention
from tests.passes.machine_code import troubles_of

pytestmark = pytest.mark.slow

DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
SMALL = form.Tiles(16, 16, 4, 1)  # several tiles a row, the last one cut, without long rows
QUERIES = [5, 0, 21]
KEYS = [7, 4, 18]
BIASES = [(3, 4, 21, 21), (1, 4, 21, 21), (3, 1, 1, 21), (1, 1, 21, 1), (1, 1, 1, 1), (3, 4, 1, 1)]


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def make(lengths_q, lengths_k, heads=4, heads_k=2, dim=16, dim_v=None, dtype=torch.float32):
    tokens = sum(lengths_q), sum(lengths_k), sum(lengths_k)
    shapes = zip(tokens, (heads, heads_k, heads_k), (dim, dim, dim_v or dim), strict=True)
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


def call_of(lengths_q, lengths_k, rule, bias=None, positions_q=None, positions_k=None, seed=7):
    longest = max([0, *lengths_q]), max([0, *lengths_k])
    cu_q = cumulative(lengths_q)
    cu_k = cu_q if lengths_k is lengths_q else cumulative(lengths_k)
    drawn = torch.tensor(seed, device=DEVICE) if rule.dropout_p else None
    return Call(cu_q, cu_k, *longest, rule, bias, positions_q, positions_k, drawn)


def by_autograd(tensors, call, grad):
    """The reference's output and gradients of query, key, value and bias."""
    given = [x.detach().requires_grad_() for x in (*tensors, *([] if call.bias is None else [call.bias]))]
    bias = given[3] if len(given) == 4 else None
    output = varlen_attention_reference(
        *given[:3], call.cu_seqlens_q, call.cu_seqlens_k, bias=bias, positions_q=call.positions_q,
        positions_k=call.positions_k, seed=call.seed, rule=call.rule,
    )  # fmt: skip
    if not output.requires_grad:
        return [output, *(torch.zeros_like(x) for x in given)]
    return [output.detach(), *torch.autograd.grad(output, given, grad, materialize_grads=True, allow_unused=True)]


def by_kernels(tensors, call, grad, tiles=SMALL):
    output, logsumexp = form.forward(*tensors, call, tiles)
    assert output.is_contiguous()
    assert logsumexp.dtype == torch.float32
    wants_bias = call.bias is not None
    found = form.backward(Saved(*tensors, output, logsumexp, call), grad, wants_bias, tiles)
    return logsumexp, [output, *found[: 4 if wants_bias else 3]]


def check(tensors, call, tolerance=1e-5, tiles=SMALL):
    grad = torch.randn(tensors[0].size(0), tensors[0].size(1), tensors[2].size(2), device=DEVICE)
    logsumexp, found = by_kernels(tensors, call, grad, tiles)
    for ours, theirs in zip(found, by_autograd(tensors, call, grad), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logsumexp, dense.forward(*tensors, call)[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (3, 2), (0, -1), (20, 30), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("lengths_k", [QUERIES, KEYS], ids=["self", "cross"])
def test_windows_and_grouped_heads(window, lengths_k):
    check(make(QUERIES, lengths_k), call_of(QUERIES, lengths_k, Rule(0.25, *window)))


@pytest.mark.parametrize(("dim", "dim_v", "heads_k"), [(16, 24, 4), (24, 16, 1), (40, 8, 2), (1, 3, 2)])
def test_head_dims_of_any_size(dim, dim_v, heads_k):
    rule = Rule(dim**-0.5, -1, 0, softcap=1.5)
    check(make([5, 20], [5, 20], heads_k=heads_k, dim=dim, dim_v=dim_v), call_of([5, 20], [5, 20], rule))


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.float32, 96), (torch.bfloat16, 128), (torch.float32, 256)]
)
def test_settings_that_are_launched(dtype, dim):
    """Without tiles of the test's own: the first ones of the lists."""
    lengths = [70, 3]
    tensors = make(lengths, lengths, heads=2, heads_k=1, dim=dim, dtype=dtype)
    bias = torch.randn(1, 2, 70, 70, device=DEVICE)
    call = call_of(lengths, lengths, Rule(dim**-0.5, -1, 0), bias)
    grad = torch.randn(73, 2, dim, dtype=dtype, device=DEVICE)
    exact = by_autograd([x.double() for x in tensors], call._replace(bias=bias.double()), grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(by_kernels(tensors, call, grad, None)[1], exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    "lengths", [([1], [1]), ([0], [0]), ([], []), ([0, 3], [2, 0]), ([3, 0], [0, 0]), ([1] * 5, [1] * 5)]
)
def test_rows_that_are_empty_or_alone(lengths):
    for window in ((-1, -1), (2, 1)):
        check(make(*lengths), call_of(*lengths, Rule(0.25, *window)))


def test_tokens_beyond_the_last_row_get_zeros():
    tensors = [torch.cat([x, torch.ones_like(x[:2])]) for x in make([3, 4], [3, 4])]
    call = call_of([3, 4], [3, 4], Rule(0.25))
    _, found = by_kernels(tensors, call, torch.ones_like(tensors[0]))
    for x in found:
        assert torch.equal(x[7:], torch.zeros_like(x[7:]))


@pytest.mark.parametrize("shape", BIASES)
def test_bias_and_its_gradient(shape):
    bias = torch.randn(shape, device=DEVICE)
    check(make(QUERIES, KEYS), call_of(QUERIES, KEYS, Rule(0.25, 9, 4, softcap=2.0), bias), 2e-5)


def test_bias_of_strides_of_its_own_and_in_half_precision():
    for bias in (
        torch.randn(21, 21, 4, device=DEVICE).permute(2, 0, 1).unsqueeze(0),
        torch.randn(1, 1, 1, 21, device=DEVICE).expand(3, 4, 21, 21),
    ):
        check(make(QUERIES, KEYS), call_of(QUERIES, KEYS, Rule(0.25), bias), 2e-5)
    half = torch.randn(1, 4, 21, 21, device=DEVICE).bfloat16()
    tensors, grad = make(QUERIES, KEYS), torch.randn(26, 4, 16, device=DEVICE)
    _, found = by_kernels(tensors, call_of(QUERIES, KEYS, Rule(0.25), half), grad)
    _, exact = by_kernels(tensors, call_of(QUERIES, KEYS, Rule(0.25), half.float()), grad)
    assert torch.equal(found[0], exact[0])
    torch.testing.assert_close(found[4], exact[4].bfloat16())


@pytest.mark.parametrize("shape", [(3, 4, 12, 14), (1, 4, 12, 14), (1, 1, 1, 14), (1, 4, 12, 1)])
def test_bias_at_positions_with_padding_left_and_holes(shape):
    positions_q = torch.tensor([7, 8, 9, 10, 11, 0, 9, 0, 1, 2, 5, 6, 8, 11], device=DEVICE)
    positions_k = torch.tensor([0, 1, 2, 3, 3, 7, 13, 0, 1, 2, 3, 6, 8, 10, 12], device=DEVICE)
    lengths = [5, 2, 7], [4, 3, 8]
    rule = Rule(0.25, 3, 1, dropout_p=0.2)
    check(make(*lengths), call_of(*lengths, rule, torch.randn(shape, device=DEVICE), positions_q, positions_k))


def test_bias_of_minus_infinity_hides_keys_and_whole_rows():
    bias = torch.zeros(2, 1, 20, 20, device=DEVICE)
    bias[0, :, :, 2:] = -math.inf
    bias[1] = -math.inf
    tensors, call = make([20, 5], [20, 5]), call_of([20, 5], [20, 5], Rule(0.25, -1, 0), bias)
    check(tensors, call)
    assert torch.equal(form.forward(*tensors, call, SMALL)[0][20:], torch.zeros(5, 4, 16, device=DEVICE))


def test_sums_of_the_bias_gradient_cut_into_parts(monkeypatch):
    bias, tensors = torch.randn(1, 1, 21, 21, device=DEVICE), make(QUERIES, KEYS)
    call = call_of(QUERIES, KEYS, Rule(0.25), bias)
    for programs in (1, 40):
        monkeypatch.setattr(form, "_BIAS_PROGRAMS", programs)
        check(tensors, call, 2e-5)


class TestDropout:
    RULE = Rule(0.25, dropout_p=0.3)

    def test_draws_what_the_other_forms_draw(self):
        for rule in (self.RULE, Rule(0.25, 5, 0, dropout_p=0.5, softcap=3.0)):
            bias = torch.randn(1, 4, 21, 21, device=DEVICE)
            check(make(QUERIES, KEYS), call_of(QUERIES, KEYS, rule, bias, seed=2**61 + 5), 2e-5)

    def test_backward_drops_what_the_forward_dropped(self):
        """With the mask as the forward shows it: values that are rows of an identity."""
        lengths = [40]
        q, k, _ = make(lengths, lengths, heads=2, heads_k=2)
        v = torch.eye(40, device=DEVICE).unsqueeze(1).expand(40, 2, 40).contiguous()
        call = call_of(lengths, lengths, self.RULE)
        grad = torch.randn(40, 2, 40, device=DEVICE)
        _, (probabilities, *found) = by_kernels((q, k, v), call, grad)
        mask = (probabilities != 0).transpose(0, 1)  # (heads, queries, keys)
        assert abs(mask.float().mean() - 0.7) < 0.04
        assert not torch.equal(mask[0], mask[1])
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        q, k, v = (x.transpose(0, 1) for x in given)
        expected = ((torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) * mask / 0.7) @ v).transpose(0, 1)
        for ours, theirs in zip(found, torch.autograd.grad(expected, given, grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def test_other_seeds_drop_others(self):
        tensors = make([30], [30])
        one, same, other = (form.forward(*tensors, call_of([30], [30], self.RULE, seed=s), SMALL)[0] for s in (3, 3, 4))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [Rule(0.25, -1, 0), Rule(0.25, 20, 3, dropout_p=0.2, softcap=5.0)])
def test_half_precision_is_as_accurate_as_torch(dtype, rule):
    tensors = make([20, 17], [20, 17], dtype=dtype)
    call = call_of([20, 17], [20, 17], rule, torch.randn(1, 4, 20, 20, device=DEVICE).to(dtype))
    grad = torch.randn(37, 4, 16, device=DEVICE, dtype=dtype)
    truth = by_autograd([x.double() for x in tensors], call._replace(bias=call.bias.double()), grad.double())
    theirs, (_, ours) = by_autograd(tensors, call, grad), by_kernels(tensors, call, grad)
    for true, other, own in zip(truth, theirs, ours, strict=True):
        assert own.dtype == dtype
        rmse_other, rmse_own = ((x.double() - true).square().mean().sqrt() for x in (other, own))
        # Triton's interpreter cuts bfloat16 off instead of rounding it, which doubles its error.
        assert rmse_own <= (2.5 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1.5) * rmse_other + 1e-5


def test_inputs_of_any_strides():
    tensors, call = make([9, 4], [9, 4], heads_k=4), call_of([9, 4], [9, 4], Rule(0.25))
    grad = torch.randn(16, 4, 13, device=DEVICE).transpose(0, 2)
    _, expected = by_kernels(tensors, call, grad.contiguous())
    fused = torch.stack(tensors, dim=1).unbind(1)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors]
    for given in (fused, turned):
        for ours, theirs in zip(by_kernels(given, call, grad)[1], expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_softcap_far_from_the_scores_changes_nothing():
    tensors = make([20], [20])
    plain, capped = (form.forward(*tensors, call_of([20], [20], Rule(0.25, softcap=cap)), SMALL) for cap in (0.0, 1e5))
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-5)


def test_says_why_it_does_not_compute_a_call():
    call = call_of([3], [3], Rule(0.25))
    assert form.why_not_triton(*make([3], [3]), call) is None
    assert form.why_not_triton(*make([3], [3], dtype=torch.float64), call) == "dtype torch.float64"
    assert "head_dim 264" in form.why_not_triton(*make([3], [3], dim=264), call)
    q, k, v = make([3], [3])
    assert "dtypes" in form.why_not_triton(q, k.half(), v, call)
    assert "bias" in form.why_not_triton(q, k, v, call._replace(bias=torch.zeros(1, 1, 3, 3).double()))


def test_the_form_is_chosen_with_its_reasons(monkeypatch):
    lengths = [3]
    call = call_of(lengths, lengths, Rule(0.25))
    tensors = make([3], [3])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "_capability", lambda _: (9, 0))
    unmeasured = "efficient: not measured on this device yet"
    assert cuda.choose_form(*tensors, call) == ("triton", ("flash: dtype torch.float32", unmeasured))
    assert cuda.choose_form(*(x.half() for x in tensors), call).form == "flash"
    form_name, reasons = cuda.choose_form(*(x.double() for x in tensors), call)
    assert form_name == "dense"
    assert reasons == tuple(f"{each}: dtype torch.float64" for each in ("flash", "triton", "efficient"))
    monkeypatch.setattr(cuda, "_triton", lambda: None)
    assert cuda.choose_form(*tensors, call).reasons[1] == "triton: Triton cannot be imported"
    monkeypatch.setattr(cuda, "_capability", lambda _: (7, 5))
    assert cuda.choose_form(*tensors, call).form == "efficient"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda.choose_form(*tensors, call).form == "dense"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "grad_query", "grad_key_value", "grad_bias"])
def test_machine_code_spills_nothing(kernel, head_dim):
    module = "deepytorch.passes.ops.varlen_attention_triton"
    found = troubles_of(module, kernel=f":{kernel}_kernel", label=f"head {head_dim},")
    assert found
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (Rule(0.1), None), (Rule(0.1, -1, 0), (1, 4, 300, 300)), (Rule(0.1, 40, 3, 0.2, 5.0), (3, 1, 300, 300)),
        (Rule(0.1, dropout_p=0.2), (1, 4, 300, 1)),
    ],
)  # fmt: skip
def test_on_a_gpu(dtype, dim, rule, shape):
    lengths = [300, 0, 77]
    given = [x.cuda().requires_grad_() for x in make(lengths, lengths, dim=dim, dtype=dtype)]
    bias = None if shape is None else torch.randn(shape, device="cuda", requires_grad=True)
    call = call_of(lengths, lengths, rule, bias)
    call = Call(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in call))
    output = varlen_attention(
        *given, call.cu_seqlens_q, call.cu_seqlens_k, 300, 300, bias=bias, seed=call.seed, **rule._asdict()
    )
    grad = torch.randn_like(output)
    ours = [output, *torch.autograd.grad(output, given if bias is None else [*given, bias], grad)]
    exact = call if bias is None else call._replace(bias=bias.detach().double())
    truth = by_autograd([x.double() for x in given], exact, grad.double())
    theirs = by_autograd(given, call, grad)
    for true, other, own in zip(truth, theirs, ours, strict=True):
        rmse_other, rmse_own = ((x.double() - true).square().mean().sqrt() for x in (other, own))
        assert rmse_own <= 2 * rmse_other + slack(true, truth[0], grad)


def slack(true, output, grad):
    """What may be off besides: where a bias is one for all keys its gradient is 0, by terms that cancel. One of them is
    made from the outputs as they are kept, that is rounded, as in FlashAttention."""
    if true.dim() != 4 or true.size(3) > 1:
        return 1e-5
    return 1e-5 + torch.finfo(grad.dtype).eps * (output * grad).square().sum(-1).mean().sqrt()


@pytest.mark.parametrize(
    ("dim", "dtype", "taken"), [(128, torch.float16, True), (256, torch.float32, True), (256, torch.float16, False)]
)
def test_wide_heads_are_taken_in_float32_alone(dim, dtype, taken):
    reason = form.why_not_triton(*make([9], [9], dim=dim, dtype=dtype), call_of([9], [9], Rule(0.1)))
    assert reason == (None if taken else "heads of 256 and 256 in torch.float16")
