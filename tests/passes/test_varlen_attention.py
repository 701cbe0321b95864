import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from deepytorch.passes.ops import varlen_attention_cpu as cpu
from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved, dropout_factor
from deepytorch.passes.ops.reference import varlen_attention_reference
from deepytorch.passes.ops.varlen_attention import varlen_attention

OP = torch.ops.deepytorch.varlen_attention.default
WINDOWS = [(-1, -1), (-1, 0), (7, 0), (3, 2), (0, -1), (0, 0), (70, 90)]
SELF = [5, 1, 70, 30]  # a tile has 64 queries
CROSS = [7, 3, 66, 90]


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make(lengths_q, lengths_k=None, heads=4, heads_k=None, dim=16, dim_v=None, dtype=torch.float32):
    """Query, key, value and the two cumulative lengths."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    heads_k = heads_k or heads
    tokens = sum(lengths_q), sum(lengths_k), sum(lengths_k)
    shapes = zip(tokens, (heads, heads_k, heads_k), (dim, dim, dim_v or dim), strict=True)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    cu_q = cumulative(lengths_q)
    cu_k = cu_q if lengths_k is lengths_q else cumulative(lengths_k)
    return q, k, v, cu_q, cu_k


def attend(q, k, v, cu_q, cu_k, rule, **extras):
    longest = (max([0, *cu.diff().tolist()]) for cu in (cu_q, cu_k))
    return varlen_attention(q, k, v, cu_q, cu_k, *longest, **rule._asdict(), **extras)


@contextlib.contextmanager
def without_kernels():
    """Where our C++ is not compiled: plain calls go to torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.KERNELS, "get", lambda: None)
        yield


@contextlib.contextmanager
def as_on_other_devices():
    """Where neither our C++ nor torch's kernels compute rows: the dense form does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "forward", dense.forward)
        patch.setattr(cpu, "backward", dense.backward)
        yield


def gradients(output, inputs, grad):
    return torch.autograd.grad(output, inputs, grad, allow_unused=True, materialize_grads=True)


def check(arguments, rule, tolerance=1e-5, **extras):
    """The operator and the dense form agree with the reference, with the gradients of every floating input."""
    q, k, v, cu_q, cu_k = arguments
    bias = extras.get("bias")
    expected = varlen_attention_reference(*arguments, rule=rule, **extras)
    grad = torch.randn_like(expected)
    inputs = [q, k, v] + ([bias] if bias is not None and bias.requires_grad else [])
    expected_grads = [torch.zeros_like(x) for x in inputs]
    if expected.requires_grad:
        expected_grads = gradients(expected, inputs, grad)

    close = {"rtol": tolerance, "atol": tolerance}
    for form in (contextlib.nullcontext, without_kernels):
        with form():
            output = attend(*arguments, rule, **extras)
            found = gradients(output, inputs, grad)
        assert output.is_contiguous()
        assert output.dtype == q.dtype
        torch.testing.assert_close(output, expected, **close)
        for ours, theirs in zip(found, expected_grads, strict=True):
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, **close)

    longest = (max([0, *cu.diff().tolist()]) for cu in (cu_q, cu_k))
    extra = (extras.get(name) for name in ("bias", "positions_q", "positions_k", "seed"))
    call = Call(cu_q, cu_k, *longest, rule, *extra)
    with torch.no_grad():
        for max_scores in (1 << 26, 6000):
            output, logsumexp = dense.forward(q, k, v, call, max_scores)
            torch.testing.assert_close(output, expected.detach(), **close)
            wants_bias = len(inputs) == 4
            grads = dense.backward(Saved(q, k, v, output, logsumexp, call), grad, wants_bias, max_scores)
            for ours, theirs in zip(grads, expected_grads, strict=False):
                torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths_k", [None, CROSS], ids=["self", "cross"])
@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_windows_and_grouped_heads(window, lengths_k, heads_k):
    check(make(SELF, lengths_k, heads_k=heads_k), Rule(0.25, *window))


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([1], None),
        ([0], None),
        ([], None),
        ([0, 3, 0, 0, 4, 0], None),
        ([0, 3, 5, 0], [2, 0, 4, 0]),
        ([70, 3], [0, 30]),
        ([1] * 9, None),
    ],
)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
def test_rows_that_are_empty_or_alone(lengths_q, lengths_k, window):
    check(make(lengths_q, lengths_k, heads_k=2), Rule(0.25, *window))


def test_tokens_beyond_the_last_row_get_zeros():
    q, k, v, cu, _ = make([3, 4])
    q, k, v = (torch.cat([x, torch.ones(2, 4, 16)]).detach().requires_grad_() for x in (q, k, v))
    output = attend(q, k, v, cu, cu, Rule(0.25))
    assert torch.equal(output[7:], torch.zeros(2, 4, 16))
    for grad in gradients(output, (q, k, v), torch.ones_like(output)):
        assert torch.equal(grad[7:], torch.zeros(2, 4, 16))


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, 5, 0), Rule(0.3, softcap=1.5), Rule(0.3, -1, 0, softcap=1.5)])
@pytest.mark.parametrize(("heads_k", "dim_v"), [(4, 16), (2, 24)])
def test_softcap_and_another_head_dim_of_values(rule, heads_k, dim_v):
    check(make(SELF, heads_k=heads_k, dim_v=dim_v), rule)


@pytest.mark.parametrize(
    "shape", [(4, 4, 70, 90), (1, 4, 70, 90), (4, 1, 70, 90), (1, 1, 1, 90), (4, 4, 70, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("rule", [Rule(0.25), Rule(0.25, 9, 0, softcap=2.0)])
def test_bias_and_its_gradient(shape, rule):
    bias = torch.randn(shape, requires_grad=True)
    check(make(SELF, CROSS, heads_k=2), rule, tolerance=2e-5, bias=bias)
    check(make(SELF, CROSS), rule, bias=bias.detach())


@pytest.mark.parametrize("shape", [(3, 4, 12, 14), (1, 4, 12, 14), (1, 1, 1, 14), (1, 4, 12, 1), (3, 1, 12, 14)])
@pytest.mark.parametrize("window", [(-1, -1), (3, 1)])
def test_bias_at_positions_with_padding_left_and_holes(shape, window):
    lengths_q, lengths_k = [5, 2, 7], [4, 3, 8]
    positions_q = torch.cat([torch.arange(7, 12), torch.tensor([0, 9]), torch.tensor([0, 1, 2, 5, 6, 8, 11])])
    positions_k = torch.cat([torch.arange(4), torch.tensor([3, 7, 13]), torch.tensor([0, 1, 2, 3, 6, 8, 10, 12])])
    for heads_k in (4, 2):
        check(
            make(lengths_q, lengths_k, heads_k=heads_k),
            Rule(0.25, *window),
            bias=torch.randn(shape, requires_grad=True),
            positions_q=positions_q,
            positions_k=positions_k,
        )


def test_bias_of_minus_infinity_hides_keys_and_whole_rows():
    q, k, v, cu, _ = make([6, 5])
    bias = torch.zeros(2, 1, 6, 6)
    bias[0, :, :, 2:] = -math.inf
    bias[1] = -math.inf
    check((q, k, v, cu, cu), Rule(0.25, -1, 0), bias=bias.requires_grad_())
    output = attend(q, k, v, cu, cu, Rule(0.25), bias=bias)
    assert torch.equal(output[6:], torch.zeros(5, 4, 16))
    assert all(grad.isfinite().all() for grad in gradients(output, (q, k, v, bias), torch.ones_like(output)))


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_padded_attention_of_torch(heads_k, causal):
    lengths, longest = [40, 7, 1, 33], 40
    q, k, v, cu, _ = make(lengths, heads_k=heads_k)
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)

    def padded(x):
        return x.new_zeros(len(lengths), longest, *x.shape[1:]).index_put((mask,), x).transpose(1, 2)

    seen = mask[:, None, None, :]
    if causal:
        seen = seen & torch.ones(longest, longest, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*map(padded, (q, k, v)), attn_mask=seen, enable_gqa=True)
    expected = expected.transpose(1, 2)[mask]
    output = attend(q, k, v, cu, cu, Rule(0.25, -1, 0 if causal else -1))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(output)
    for ours, theirs in zip(*(gradients(x, (q, k, v), grad) for x in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [Rule(0.25, -1, 0), Rule(0.25, 20, 0, softcap=5.0)])
def test_half_precision_is_as_accurate_as_torch(dtype, rule):
    exact = make([70, 31], dtype=torch.float64)
    *tensors, cu, _ = exact
    half = [x.detach().to(dtype).requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in half]
    truth = varlen_attention_reference(*exact, cu, cu, rule=rule)
    theirs = varlen_attention_reference(*half, cu, cu, rule=rule)
    ours = attend(*half, cu, cu, rule)
    grad = torch.randn_like(theirs)
    all_truth, all_theirs, all_ours = (
        (x, *gradients(x, inputs, grad.to(x.dtype))) for x, inputs in ((truth, exact), (theirs, half), (ours, half))
    )
    for true, other, own in zip(all_truth, all_theirs, all_ours, strict=True):
        assert own.dtype == dtype
        rmse_other, rmse_own = ((x.double() - true).square().mean().sqrt() for x in (other, own))
        assert rmse_own <= 3 * rmse_other + 1e-4


@pytest.mark.parametrize(
    "rule", [Rule(0.25, -1, 0), Rule(0.25), Rule(0.25, 5, 0), Rule(0.25, 5, 0, 0.3), Rule(0.25, -1, 0, softcap=2.0)]
)
@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("form", [contextlib.nullcontext, without_kernels, as_on_other_devices])
@pytest.mark.parametrize("by_query", [False, True])
def test_sinks_and_their_gradient(rule, heads_k, form, by_query):
    """One more score a head, for a value of zeros: a query whose keys all score low gets next to nothing."""
    arguments = make([5, 0, 1, 70, 30], heads_k=heads_k)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0])
    sinks = (sinks + torch.randn(len(arguments[0]), 1) if by_query else sinks).requires_grad_()
    seed = torch.tensor(7) if rule.dropout_p else None
    inputs = [*arguments[:3], sinks]
    expected = varlen_attention_reference(*arguments, rule=rule, seed=seed, sinks=sinks)
    grad = torch.randn_like(expected)
    with form():
        output = attend(*arguments, rule, seed=seed, sinks=sinks)
        found = gradients(output, inputs, grad)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, gradients(expected, inputs, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_logsumexp_is_that_of_the_scores():
    q, k, v, cu, _ = make([70, 9], heads_k=2)
    scores = torch.einsum("qhd,khd->hqk", q[:70], k[:70].repeat_interleave(2, dim=1)) * 0.25
    for extra in ({}, {"softcap": 1e4}):
        _, logsumexp = OP(q, k, v, cu, cu, 70, 70, scale=0.25, **extra)
        assert logsumexp.shape == (4, 79)
        assert logsumexp.dtype == torch.float32
        assert not logsumexp.requires_grad
        torch.testing.assert_close(logsumexp[:, :70], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_inputs_of_any_strides():
    q, k, v, cu, _ = make([9, 4], heads=4)
    expected = attend(q, k, v, cu, cu, Rule(0.25))
    fused = torch.stack([q, k, v], dim=1)
    torch.testing.assert_close(attend(*fused.unbind(1), cu, cu, Rule(0.25)), expected)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    output = attend(*turned, cu, cu, Rule(0.25))
    torch.testing.assert_close(output, expected)
    grad = torch.randn(16, 4, 13).transpose(0, 2)
    for ours, theirs in zip(*(gradients(x, (q, k, v), grad) for x in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


class TestDropout:
    RULE = Rule(0.25, -1, 0, dropout_p=0.3)

    def test_matches_the_reference_whatever_the_tiles(self):
        seed = torch.tensor(11)
        for rule in (self.RULE, Rule(0.25, 40, -1, dropout_p=0.5, softcap=3.0)):
            check(make(SELF, heads_k=2), rule, seed=seed)
            check(make(SELF, CROSS), rule, seed=seed, bias=torch.randn(1, 4, 150, 170, requires_grad=True))
        holes = {"positions_q": torch.tensor([3, 5, 0, 1]), "positions_k": torch.tensor([5, 6, 1, 4])}
        check(make([2, 2]), self.RULE, seed=seed, bias=torch.randn(1, 1, 7, 7, requires_grad=True), **holes)

    def test_same_seed_same_draws_and_other_seed_others(self):
        arguments = make(SELF)
        one, same, other = (attend(*arguments, self.RULE, seed=torch.tensor(seed)) for seed in (3, 3, 4))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_follows_the_generator_without_a_seed(self):
        arguments = make(SELF)
        torch.manual_seed(5)
        one, other = attend(*arguments, self.RULE), attend(*arguments, self.RULE)
        torch.manual_seed(5)
        assert torch.equal(attend(*arguments, self.RULE), one)
        assert not torch.equal(one, other)

    def test_recomputed_under_checkpointing(self):
        q, k, v, cu, _ = make(SELF)
        seed = torch.tensor(3)

        def layer(q, k, v):
            return attend(q.sin(), k, v, cu, cu, self.RULE, seed=seed).cos()

        outputs = layer(q, k, v), checkpoint(layer, q, k, v, use_reentrant=False)
        grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in outputs]
        for plain, recomputed in zip(*grads, strict=True):
            assert torch.equal(plain, recomputed)

    def test_backward_is_that_of_the_forward_draws(self):
        q, k, v, cu, _ = make([4, 3], heads=2, dim=3, dtype=torch.float64)
        seed = torch.tensor(3)
        assert torch.autograd.gradcheck(lambda *x: attend(*x, cu, cu, self.RULE, seed=seed), (q, k, v))

    @pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
    def test_draws_are_even_and_independent(self, dropout_p):
        size, heads = 192, 4
        index = torch.arange(size).unsqueeze(0)
        seeds = [
            dropout_factor(torch.tensor(seed), torch.arange(2), heads, index, index, dropout_p, torch.float64)
            for seed in (0, 1, 2**61 + 7)
        ]
        draws = torch.stack(seeds)  # (seeds, rows, heads, queries, keys)
        values = torch.tensor([0.0, 1 / (1 - dropout_p)], dtype=torch.float64)
        torch.testing.assert_close(draws.unique(), values)
        # Means over n draws deviate by sqrt(p / (1 - p) / n); six of these are allowed for every mean.
        for dims in ((0, 1, 2, 3, 4), (3, 4), (0, 1, 2, 3), (0, 1, 2, 4)):
            count = math.prod(draws.size(dim) for dim in dims)
            spread = math.sqrt(dropout_p / (1 - dropout_p) / count)
            assert (draws.mean(dims) - 1).abs().max() < 6 * spread
        centred = (draws - 1) / math.sqrt(dropout_p / (1 - dropout_p))
        limit = 6 / math.sqrt(centred.numel() / 3)
        for dim in range(5):
            assert (centred * centred.roll(1, dim)).mean().abs() < limit
        assert (centred * centred.roll((1, 1), (3, 4))).mean().abs() < limit
        off_diagonal = ~torch.eye(size, dtype=torch.bool)
        assert (centred * centred.transpose(3, 4))[..., off_diagonal].mean().abs() < limit

    def test_expected_output_is_that_without_dropout(self):
        q, k, v, cu, _ = make([30], dim=8)
        with torch.no_grad():
            draws = [attend(q, k, v, cu, cu, self.RULE, seed=torch.tensor(seed)) for seed in range(400)]
            exact = attend(q, k, v, cu, cu, self.RULE._replace(dropout_p=0.0))
        spread = torch.stack(draws).std(0) / math.sqrt(len(draws))
        deviation = (torch.stack(draws).mean(0) - exact).abs()
        assert (deviation < 6 * spread + 1e-6).all()


@pytest.mark.parametrize(
    "rule",
    [Rule(0.4), Rule(0.4, -1, 0), Rule(0.4, 1, 1), Rule(0.4, 1, 0, softcap=1.2), Rule(0.4, 1, 1, dropout_p=0.4)],
)
def test_gradients_by_finite_differences(rule):
    q, k, v, cu_q, cu_k = make([3, 0, 2], [2, 1, 3], heads=2, heads_k=1, dim=3, dtype=torch.float64)
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(8) if rule.dropout_p else None
    assert torch.autograd.gradcheck(lambda *x: attend(*x, cu_q, cu_k, rule, seed=seed), (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: attend(q, k, v, cu_q, cu_k, rule, bias=bias, seed=seed), (q, k, v, bias)
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=5),
    left=st.integers(-1, 80),
    right=st.integers(-1, 80),
    group=st.sampled_from([1, 2]),
    shared=st.booleans(),
)
def test_any_lengths_and_windows(lengths, left, right, group, shared):
    lengths_q = [q for q, _ in lengths]
    lengths_k = None if shared else [k for _, k in lengths]
    check(make(lengths_q, lengths_k, heads=2, heads_k=2 // group, dim=4), Rule(0.5, left, right))


@pytest.mark.parametrize(
    ("rule", "extras"),
    [
        (Rule(0.25, -1, 0), {}),
        (Rule(0.25, 3, 2, softcap=2.0), {}),
        (Rule(0.25, dropout_p=0.2), {"bias": True}),
    ],
)
def test_opcheck(rule, extras):
    q, k, v, cu, _ = make([5, 0, 4], heads_k=2)
    bias = torch.randn(1, 4, 5, 5, requires_grad=True) if extras else None
    seed = torch.tensor(1) if rule.dropout_p else None
    arguments = (q, k, v, cu, cu, 5, 5, bias, None, None, seed)
    torch.library.opcheck(OP, arguments, rule._asdict())


def _model(x, weight, cu, longest, bias):
    q, k, v = (x @ weight).view(x.size(0), 3, 4, 8).unbind(1)
    output = varlen_attention(q, k, v, cu, cu, longest, longest, bias=bias, window_right=0)
    return output.flatten(1).sin()


@pytest.mark.parametrize(
    ("backend", "biased"),
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.slow)],
)
def test_compiled_once_for_all_lengths(backend, biased):
    torch._dynamo.reset()
    compiled = torch.compile(_model, backend=backend, fullgraph=True)
    weight = torch.randn(16, 96).mul_(0.3).requires_grad_()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, assume_static_by_default=True):
        for step, lengths in enumerate(([5, 9, 2], [30, 1, 4], [7, 11], [80, 3, 60, 2], [2, 2])):
            x = torch.randn(sum(lengths), 16, requires_grad=True)
            bias = torch.randn(1, 4, 90, 90, requires_grad=True) if biased else None
            cu = cumulative(lengths)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(cu, 0)
            # The longest row is a number: Dynamo makes it symbolic when it sees a second one.
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                output = compiled(x, weight, cu, max(lengths), bias)
            expected = _model(x, weight, cu, max(lengths), bias)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
            inputs = [x, weight] + ([bias] if biased else [])
            grad = torch.randn_like(output)
            for ours, theirs in zip(*(gradients(y, inputs, grad) for y in (output, expected)), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_torch_attention_does(compiled):
    q, k, v, cu, _ = make([9, 4])
    value = v.detach().to(torch.bfloat16).requires_grad_()

    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return varlen_attention(q, k, v, cu, cu, 9, 9)

    torch._dynamo.reset()
    output = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(q, k, value)
    assert output.dtype == torch.bfloat16
    expected = attend(q.bfloat16(), k.bfloat16(), value, cu, cu, Rule(0.25))
    torch.testing.assert_close(output, expected)
    for grad, x in zip(gradients(output, (q, k, value), torch.ones_like(output)), (q, k, value), strict=True):
        assert grad.dtype == x.dtype
    double = make([3], dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*double, Rule(0.25)).dtype == torch.float64


@pytest.mark.parametrize("wants_bias", [False, True], ids=["constant bias", "bias with a gradient"])
@pytest.mark.parametrize(
    ("rule", "heads_k"),
    [
        (Rule(0.25), 2),
        (Rule(0.25, -1, 0), 1),
        (Rule(0.25, 1, 1, 0.0, 2.0), 2),
        (Rule(0.25, -1, 0, 0.4), 2),
    ],
    ids=["plain", "causal", "window and softcap", "dropout"],
)
def test_second_derivatives(rule, heads_k, wants_bias):
    """Against differences of the first ones, which the fast kernels give."""
    q, k, v, cu, _ = make([3, 0, 2], heads=2, heads_k=heads_k, dim=3, dtype=torch.float64)
    bias = torch.randn(3, 1, 3, 3, dtype=torch.float64, requires_grad=wants_bias)
    seed = torch.tensor(7)

    def call(q, k, v, bias):
        return attend(q, k, v, cu, cu, rule, bias=bias, seed=seed if rule.dropout_p else None)

    assert torch.autograd.gradgradcheck(call, (q, k, v, bias), gen_non_contig_grad_outputs=True)


def test_third_derivatives():
    q, k, v, cu, _ = make([3, 2], heads=2, dim=3, dtype=torch.float64)

    def derivatives(attention):
        [one] = torch.autograd.grad(attention().square().sum(), q, create_graph=True)
        [two] = torch.autograd.grad(one.square().sum(), k, create_graph=True)
        return torch.autograd.grad(two.square().sum(), (q, k, v))

    expected = derivatives(lambda: varlen_attention_reference(q, k, v, cu, cu, rule=Rule(0.25)))
    torch.testing.assert_close(derivatives(lambda: attend(q, k, v, cu, cu, Rule(0.25))), expected)


@pytest.mark.parametrize("needed", ["q", "k", "v", "qv"])
def test_derivatives_of_some_inputs_alone(needed):
    given = make([3, 2], heads=2, dim=3, dtype=torch.float64)
    given = [each.detach().requires_grad_(name in needed) for name, each in zip("qkv", given[:3], strict=True)] + [
        given[3]
    ]
    floats = [each for each in given[:3] if each.requires_grad]

    def derivatives(attention):
        one = torch.autograd.grad(attention().square().sum(), floats, create_graph=True)
        two = torch.autograd.grad(sum(x.square().sum() for x in one), floats, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in two), floats, allow_unused=True)

    q, k, v, cu = given
    expected = derivatives(lambda: varlen_attention_reference(q, k, v, cu, cu, rule=Rule(0.25, -1, 0)))
    torch.testing.assert_close(derivatives(lambda: attend(q, k, v, cu, cu, Rule(0.25, -1, 0))), expected)


def test_second_derivatives_in_half_precision_with_a_bias_in_full():
    q, k, v, cu, _ = make([3, 2], heads=2, dim=4, dtype=torch.bfloat16)
    bias = torch.randn(2, 1, 3, 3, requires_grad=True)
    [one] = torch.autograd.grad(
        attend(q, k, v, cu, cu, Rule(0.5), bias=bias).float().square().sum(), q, create_graph=True
    )
    two = torch.autograd.grad(one.float().square().sum(), (q, k, v, bias))
    exact = [each.detach().double().requires_grad_() for each in (q, k, v, bias)]
    whole = varlen_attention_reference(*exact[:3], cu, cu, rule=Rule(0.5), bias=exact[3])
    [wanted] = torch.autograd.grad(whole.square().sum(), exact[0], create_graph=True)
    for found, expected in zip(two, torch.autograd.grad(wanted.square().sum(), exact), strict=True):
        assert (found.double() - expected).norm() < 0.05 * expected.norm()


def test_second_derivatives_of_rows_that_see_nothing():
    q, k, v, cu_q, cu_k = make([3], [0], heads=2, dim=3)
    [grad] = torch.autograd.grad(attend(q, k, v, cu_q, cu_k, Rule(0.25)).sum(), q, create_graph=True)
    assert torch.equal(grad, torch.zeros_like(q))
    [second] = torch.autograd.grad(grad.sum(), q, materialize_grads=True)
    assert torch.equal(second, torch.zeros_like(q))


def _bad(**changes):
    q, k, v, cu, _ = make([3, 2])
    arguments = {"query": q, "key": k, "value": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_q": 3, "max_k": 3}
    return lambda: varlen_attention(**{**arguments, **changes})


@pytest.mark.parametrize(
    "call",
    [
        _bad(query=torch.randn(5, 64)),
        _bad(query=torch.ones(5, 4, 16, dtype=torch.int64)),
        _bad(query=torch.randn(5, 4, 8)),
        _bad(query=torch.randn(5, 4, 16, dtype=torch.float64)),
        _bad(key=torch.randn(5, 3, 16), value=torch.randn(5, 3, 16)),
        _bad(value=torch.randn(4, 4, 16)),
        _bad(cu_seqlens_q=torch.tensor([0, 3, 5])),
        _bad(cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32)),
        _bad(bias=torch.randn(2, 4, 3)),
        _bad(bias=torch.randn(3, 4, 3, 3)),
        _bad(bias=torch.randn(1, 1, 2, 3)),
        _bad(bias=torch.randn(1, 1, 3, 3), positions_q=torch.arange(4)),
        _bad(bias=torch.randn(1, 1, 3, 3), positions_k=torch.arange(5).int()),
        _bad(dropout_p=1.0),
        _bad(dropout_p=0.1, seed=torch.tensor([1])),
        _bad(softcap=-1.0),
        _bad(window_left=-2),
    ],
)
def test_wrong_arguments_say_what_was_expected(call):
    with pytest.raises(ValueError, match=r"varlen_attention: found .*; expected "):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rule", [Rule(0.125), Rule(0.125, -1, 0), Rule(0.125, 40, 0), Rule(0.125, softcap=4.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths_k", [None, CROSS], ids=["self", "cross"])
def test_cuda_equals_cpu(rule, dtype, lengths_k):
    arguments = make(SELF, lengths_k, heads_k=2, dim=64)
    on_gpu = [x.detach().to("cuda", dtype if x.is_floating_point() else None) for x in arguments]
    if lengths_k is None:
        on_gpu[4] = on_gpu[3]
    for x in on_gpu[:3]:
        x.requires_grad_()
    expected, output = attend(*arguments, rule), attend(*on_gpu, rule)
    grad = torch.randn_like(expected)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    ours, theirs = gradients(output, on_gpu[:3], grad.to(output)), gradients(expected, arguments[:3], grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu().float(), b, rtol=tolerance, atol=tolerance)
