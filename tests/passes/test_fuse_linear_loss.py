from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import deepytorch
from deepytorch.compiler.report import LEDGER
from deepytorch.passes.base import Context
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss

CLASSES, SIZE = 24, 8
FUSED = torch.ops.deepytorch.linear_cross_entropy.default
LOGITS = torch.ops.aten.linear.default


def given(dtype: torch.dtype = torch.float32, rows: int = 3, positions: int = 5) -> list[torch.Tensor]:
    x, weight, bias = torch.randn(rows, positions, SIZE), torch.randn(CLASSES, SIZE), torch.randn(CLASSES)
    target = torch.randint(0, CLASSES, (rows, positions))
    target[0, 2:] = -100
    return [*(each.to(dtype).requires_grad_() for each in (x, weight, bias)), target]


def rewritten(call: Callable[..., Any], arguments: list[torch.Tensor], **fields: Any) -> tuple[fx.GraphModule, Any]:
    """The graph of a call after the pass, and what the pass says."""
    fakes = [each.detach().clone().requires_grad_(each.requires_grad) for each in arguments]
    traced = make_fx(call, pre_dispatch=True, tracing_mode="fake")(*fakes)
    module = fx.GraphModule(traced, traced.graph)
    module.graph.eliminate_dead_code()
    rewrite = FuseLinearLoss(**{"least_bytes": 0, **fields}).rewrite(module, Context())
    module.graph.lint()
    module.recompile()
    return module, rewrite


def calls(module: fx.GraphModule, target: Any) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def flat(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1))


def without_bias(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).reshape(-1, CLASSES), t.reshape(-1)) + b.sum()


def shifted(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    """As Hugging Face models of old write it."""
    logits = F.linear(x, w, b).float()
    before, after = logits[..., :-1, :].contiguous(), t[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(before.view(-1, CLASSES), after.view(-1))


def sum_of_some(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    logits = F.linear(x, w, b).float().view(-1, CLASSES)
    return F.cross_entropy(logits, t.view(-1).clamp(min=0), ignore_index=0, reduction="sum") / 7


def capped(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    logits = torch.tanh(F.linear(x, w, b) / 5.0) * 5.0
    return F.cross_entropy(logits.view(-1, CLASSES), t.view(-1), label_smoothing=0.1)


def weighed(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1), weight=b.detach().abs())


def flattened(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    return F.cross_entropy(input=F.linear(x, w, b).flatten(0, -2).float(), target=t.flatten())


def row_losses(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    """Each row counts as much as it is long, say."""
    losses = F.cross_entropy(F.linear(x, w, b).float().view(-1, CLASSES), t.view(-1), reduction="none").view(t.shape)
    return (losses * torch.linspace(0.5, 2.0, t.shape[-1])).sum()


def smoothed_row_losses(x: Any, w: Any, b: Any, t: Any) -> torch.Tensor:
    logits = torch.tanh(F.linear(x, w, b) / 5.0) * 5.0
    losses = F.cross_entropy(logits.view(-1, CLASSES), t.view(-1), label_smoothing=0.1, reduction="none")
    return losses.square().mean()


FUSED_CALLS = [flat, without_bias, shifted, sum_of_some, capped, weighed, flattened, row_losses, smoothed_row_losses]


@pytest.mark.parametrize("call", FUSED_CALLS, ids=lambda c: c.__name__)
def test_a_loss_that_alone_reads_its_logits_is_fused(call):
    arguments = given()
    module, rewrite = rewritten(call, arguments)
    assert rewrite.fired
    assert not rewrite.declined
    assert (calls(module, FUSED), calls(module, LOGITS)) == (1, 0)
    loss, wanted = module(*arguments), call(*arguments)
    torch.testing.assert_close(loss, wanted)
    floats = arguments[:3]
    found, expected = (torch.autograd.grad(each, floats, allow_unused=True) for each in (loss, wanted))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_half_precision_keeps_the_dtype_of_the_loss():
    arguments = given(torch.bfloat16)
    halves, floats = [flat, smoothed_row_losses], [shifted, row_losses]
    for call, dtype in [(each, torch.bfloat16) for each in halves] + [(each, torch.float32) for each in floats]:
        module, rewrite = rewritten(call, arguments)
        assert rewrite.fired
        loss, wanted = module(*arguments), call(*arguments)
        assert loss.dtype == wanted.dtype == dtype
        torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("call", [flat, shifted], ids=lambda c: c.__name__)
def test_float16_under_a_scaler_keeps_its_small_gradients(call):
    arguments = given(torch.float16)
    module, rewrite = rewritten(call, arguments)
    assert rewrite.fired
    scale, floats = 65536.0 * 1e-4, arguments[:3]
    exact = [each.detach().double().requires_grad_() for each in floats]
    right = torch.autograd.grad(F.cross_entropy(*_rows_of(call, exact, arguments[3])) * scale, exact)
    loss, wanted = module(*arguments), call(*arguments)
    assert loss.dtype == wanted.dtype
    found, eager = (torch.autograd.grad(each * scale, floats) for each in (loss, wanted))
    for one, other, best in zip(found, eager, right, strict=True):
        assert one.dtype == torch.float16
        ours, theirs = ((each.double() - best).norm() for each in (one, other))
        assert ours <= 1.1 * theirs + 1e-3 * best.norm()


def _rows_of(call: Any, floats: list[torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(*floats)
    if call is shifted:
        logits, target = logits[..., :-1, :], target[..., 1:]
    return logits.reshape(-1, CLASSES), target.reshape(-1)


def test_under_autocast_the_layer_is_computed_as_autocast_would():
    arguments = given()
    with torch.autocast("cpu", torch.bfloat16):
        module, _ = rewritten(flat, arguments)
        loss, wanted = module(*arguments), flat(*arguments)
    assert loss.dtype == wanted.dtype
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=2e-2)


def returns_logits(x: Any, w: Any, b: Any, t: Any) -> Any:
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits.view(-1, CLASSES), t.view(-1)), logits


def z_loss(x: Any, w: Any, b: Any, t: Any) -> Any:
    logits = F.linear(x, w, b).view(-1, CLASSES)
    return F.cross_entropy(logits, t.view(-1)) + logits.logsumexp(-1).square().mean()


def scaled(x: Any, w: Any, b: Any, t: Any) -> Any:
    return F.cross_entropy((F.linear(x, w, b) * 2).view(-1, CLASSES), t.view(-1))


def smoothed_and_weighed(x: Any, w: Any, b: Any, t: Any) -> Any:
    logits = F.linear(x, w, b).view(-1, CLASSES)
    return F.cross_entropy(logits, t.view(-1), weight=b.detach().abs(), label_smoothing=0.1)


def soft_targets(x: Any, w: Any, b: Any, t: Any) -> Any:
    return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), F.one_hot(t.view(-1).clamp(0), CLASSES).float())


def classes_second(x: Any, w: Any, b: Any, t: Any) -> Any:
    return F.cross_entropy(F.linear(x, w, b).transpose(1, 2), t)


def no_layer(x: Any, w: Any, b: Any, t: Any) -> Any:
    return F.cross_entropy((x @ w.t()).view(-1, CLASSES), t.view(-1))


def layer_without_gradients(x: Any, w: Any, b: Any, t: Any) -> Any:
    with torch.no_grad():
        logits = F.linear(x, w, b)
    return F.cross_entropy(logits.view(-1, CLASSES), t.view(-1)) + 0.0 * x.sum()


def written_in_between(x: Any, w: Any, b: Any, t: Any) -> Any:
    h = torch.tanh(x.detach())
    logits = F.linear(h, w.detach(), b)
    h.fill_(3.0)
    return F.cross_entropy(logits.view(-1, CLASSES), t.view(-1)) + h.sum()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (layer_without_gradients, "the grad mode changes"),
        (written_in_between, "something is written"),
        (returns_logits, "is read elsewhere, too"),
        (z_loss, "is read elsewhere, too"),
        (scaled, "mul stands between them"),
        (smoothed_and_weighed, "labels are smoothed and classes weighed"),
        (soft_targets, "not over rows of classes and their numbers"),
        (classes_second, "not over rows of classes and their numbers"),
        (no_layer, "stands between them"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_what_needs_its_logits_keeps_them(call, reason):
    arguments = given()
    module, rewrite = rewritten(call, arguments)
    assert not rewrite.fired
    [declined] = rewrite.declined
    assert reason in declined.reason
    assert calls(module, FUSED) == 0
    torch.testing.assert_close(module(*arguments), call(*arguments))


def test_a_loss_of_logits_that_are_given_does_not_keep_another_one_from_being_fused():
    def both(x: Any, w: Any, b: Any, t: Any, logits: Any) -> Any:
        return F.cross_entropy(F.linear(x, w, b).flatten(0, 1), t.flatten()) + F.cross_entropy(logits, t.flatten())

    x, w, b, t = given()
    module, rewrite = rewritten(both, [x, w, b, t, torch.randn(t.numel(), w.shape[0])])
    assert len(rewrite.changes) == 1
    assert [each.reason for each in rewrite.declined if "stands between" in each.reason]
    assert calls(module, torch.ops.deepytorch.linear_cross_entropy.default) == 1


def test_small_logits_and_those_of_float16_are_kept():
    bytes_of_logits = 3 * 5 * CLASSES * 4
    assert rewritten(flat, given(), least_bytes=bytes_of_logits)[1].fired
    _, small = rewritten(flat, given(), least_bytes=bytes_of_logits + 1)
    assert not small.fired
    assert not small.declined


# ---------------------------------------------------------------- whole models


class Recurrent(nn.Module):
    """No attention, no padding: the loss alone is rewritten."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def train(model: nn.Module, call: Callable[..., Any], sizes: tuple[tuple[int, int], ...]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, (rows, positions) in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 50, (rows, positions), generator=generator)
        loss = call(ids, ids.masked_fill(ids % 7 == 0, -100))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_without_attention_gains_by_its_loss_alone(monkeypatch, lowering):
    torch._dynamo.reset()
    torch.manual_seed(0)
    fuse_all(monkeypatch)
    model = Recurrent(64)
    reference = copy.deepcopy(model)
    sizes = ((4, 6), (4, 6), (5, 9), (3, 7), (2, 2))
    before = len(LEDGER.report().regions)
    compiled = torch.compile(
        model, backend="deepytorch", options={"lowering": lowering, "wait": True, "fuse_loss": True}
    )
    losses, expected = train(model, compiled, sizes), train(reference, reference, sizes)
    assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    regions = LEDGER.report().regions[before:]
    assert {region.outcome for region in regions} == {"rewritten"}
    assert any("are one operator" in change for region in regions for change in region.changes)
    assert not any(region.fallbacks for region in regions)


@pytest.mark.parametrize(
    ("dtype", "rows", "outcome"),
    [
        (torch.float32, 17, "rewritten"),  # of 16,384 classes: 1 MiB of logits, and some more
        (torch.float32, 15, "declined"),
        (torch.float64, 17, "declined"),
    ],
)
def test_smaller_logits_are_fused_where_that_is_faster(dtype, rows, outcome):
    torch._dynamo.reset()
    before = len(LEDGER.report().regions)
    model = Recurrent(1 << 14).to(dtype)
    options = {"lowering": "aot_eager", "wait": True, "fuse_loss": True}
    train(model, torch.compile(model, backend="deepytorch", options=options), ((1, rows),))
    [region] = LEDGER.report().regions[before:]
    assert region.outcome == outcome


@pytest.mark.parametrize("fuse_loss", [None, False])
def test_a_model_that_is_not_packed_is_left_alone_unless_it_is_asked_for(monkeypatch, fuse_loss):
    torch._dynamo.reset()
    fuse_all(monkeypatch)
    before = len(LEDGER.report().regions)
    model = Recurrent(64)
    options = {"lowering": "aot_eager", "fuse_loss": fuse_loss}
    train(model, torch.compile(model, backend="deepytorch", options=options), ((4, 6),))
    [region] = LEDGER.report().regions[before:]
    assert region.outcome == "declined"


def test_few_classes_are_not_fused_for_speed():
    x, w = torch.randn(600, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    target = torch.randint(0, 512, (600,))

    def call(x, w, target):
        return F.cross_entropy(F.linear(x, w), target)

    assert FuseLinearLoss.faster_bytes < 600 * 512 * 4
    module, _ = rewritten(call, [x, w, target], least_bytes=None)
    assert calls(module, FUSED) == 0


def test_logits_that_are_cast_on_their_way_to_the_loss_are_not_fused_for_speed(monkeypatch):
    monkeypatch.setattr("deepytorch.passes.fuse_linear_loss._LEAST_CLASSES", 1)
    for dtype, number in ((torch.bfloat16, 0), (torch.float32, 1)):
        module, _ = rewritten(shifted, given(dtype), least_bytes=None, faster_bytes=0)
        assert calls(module, FUSED) == number


def test_losses_of_rows_are_not_fused_for_speed(monkeypatch):
    monkeypatch.setattr("deepytorch.passes.fuse_linear_loss._LEAST_CLASSES", 1)

    def of_rows(x, w, b, t):
        return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1), reduction="none").sum()

    for call, number in ((flat, 1), (of_rows, 0)):
        module, _ = rewritten(call, given(), least_bytes=None, faster_bytes=0)
        assert calls(module, FUSED) == number


@pytest.mark.parametrize("fuse_loss", [True, None])
def test_the_head_of_a_packed_model_is_fused_and_its_logits_can_still_be_read(monkeypatch, fuse_loss):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    fuse_all(monkeypatch)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    reference = copy.deepcopy(model)
    before = len(LEDGER.report().regions)
    compiled = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager", "fuse_loss": fuse_loss})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, reference)]
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        lengths = torch.randint(3, 20, (6, 1), generator=generator)
        real = torch.arange(int(lengths.max())) < lengths
        ids = torch.randint(1, 64, real.shape, generator=generator)
        batch = {"input_ids": ids * real, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)}
        with deepytorch.paused():
            expected = reference(**batch)
        found = compiled(**batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        if number > 2:  # read at tokens, as a metric does
            torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)
        for each, output in ((optimizers[0], found), (optimizers[1], expected)):
            each.zero_grad()
            output.loss.backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        for each in optimizers:
            each.step()
    regions = LEDGER.report().regions[before:]
    assert any("are one operator" in change for region in regions for change in region.changes)
    assert sum(region.steps_packed for region in regions) >= 4
    assert not any(region.fallbacks for region in regions)


def fuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the logits."""
    monkeypatch.setattr(FuseLinearLoss, "_is_much", lambda self, places, fast: True)
