"""Whatever a script does with a region's outputs, it trains as in eager: packed where no pad has a part in it, padded
from the first step on where one has, in eager where gradients of outputs themselves are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER, Report
from deepytorch.errors import DeferredError
from tests.compiler.parity import (
    COMPILED,
    OPTIONS,
    Batch,
    Pair,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    causal_batch,
    describe,
)

hf = pytest.importorskip("transformers")

SIZES = ((4, 11, "right"), (4, 13, "mixed"), (3, 9, "right"), (5, 12, "right"))
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def llama(**kwargs: Any) -> nn.Module:
    config = hf.LlamaConfig(vocab_size=96, num_key_value_heads=2, max_position_embeddings=64, **{**WIDTHS, **kwargs})
    return hf.LlamaForCausalLM(config).train()


def bert(**kwargs: Any) -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertModel(
        hf.BertConfig(vocab_size=96, max_position_embeddings=64, **{**still, **WIDTHS, **kwargs})
    ).train()


def without_labels(model: nn.Module, batch: Batch, **kwargs: Any) -> Any:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **kwargs)


def ignoring_pads(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    logits = without_labels(model, batch).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), batch["labels"][:, 1:].reshape(-1))


def counting_pads(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    logits = without_labels(model, batch).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["input_ids"][:, 1:].reshape(-1))


def z_loss_everywhere(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    found = model(**batch)
    return found.loss + 1e-2 * found.logits.logsumexp(-1).square().mean()


def z_loss_at_tokens(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    found, mask = model(**batch), batch["attention_mask"]
    return found.loss + 1e-2 * (found.logits.logsumexp(-1).square() * mask).sum() / mask.sum()


def both_kinds(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    """One output used at tokens, another one everywhere."""
    found = model(**batch, output_hidden_states=True)
    entropy = -(found.logits.softmax(-1) * found.logits.log_softmax(-1)).sum(-1)
    return found.loss - 1e-2 * entropy[batch["attention_mask"].bool()].mean() + found.hidden_states[1].square().mean()


def masked_mean(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    hidden = without_labels(model, batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).expand(hidden.size()).float()
    return ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)).square().sum()


def mean(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    return without_labels(model, batch).last_hidden_state.mean(1).square().sum()


def first_token(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    return without_labels(model, batch).last_hidden_state[:, 0].square().sum()


def last_token(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    hidden = without_labels(model, batch).last_hidden_state
    return hidden[torch.arange(hidden.shape[0]), batch["attention_mask"].sum(1) - 1].square().sum()


# Other uses are cases of tests/compiler/test_pad_safe.py and scripts in tests/scripts/scenarios.
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], str]] = {
    "loss outside, pads counted": (llama, counting_pads, "padded"),
    "one output each way": (llama, both_kinds, "padded"),
    "mean over tokens": (bert, masked_mean, "packed"),
    "mean over positions": (bert, mean, "padded"),
}


def right_padded(device: str = "cpu", sizes: Any = SIZES) -> list[Batch]:
    return [
        {name: value.to(device) for name, value in batch.items()}
        for batch in batches(causal_batch, *((rows, positions, "right") for rows, positions, _ in sizes))
    ]


def assert_way(report: Report, way: str, steps: int) -> None:
    """The first step was watched (two where transformers cuts its first graph), and all others went this way."""
    packed, padded, watched = (report.total(f"steps_{name}") for name in ("packed", "padded", "profiled"))
    assert watched in (1, 2), describe(report)
    left = steps - watched
    assert (packed, padded) == ((left, 0) if way == "packed" else (0, left)), describe(report)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_a_script_trains_as_in_eager_and_goes_the_way_that_its_uses_allow(name: str, device: str) -> None:
    make, call, way = CALLS[name]
    pair = Pair(make().to(device), call=call)
    given = right_padded(device)
    assert_way(pair.train(given), way, len(given))


@pytest.mark.slow
def test_positions_are_picked_packed_where_they_are_tokens_and_padded_where_one_is_not() -> None:
    for call in (last_token, first_token):
        torch._dynamo.reset()
        pair = Pair(bert(), call=call)
        assert_way(pair.train(right_padded()), "packed", len(SIZES))
    torch._dynamo.reset()
    pair = Pair(llama().model, call=first_token)
    report = pair.train(batches(causal_batch, *((rows, positions, "left") for rows, positions, _ in SIZES)))
    assert_way(report, "padded", len(SIZES))


@pytest.mark.slow
def test_all_paddings_train_as_in_eager() -> None:
    given = batches(causal_batch, *((4, 11, kind) for kind in ("right", "left", "mixed", "holes", "one", "none")))
    for call in (ignoring_pads, z_loss_at_tokens, z_loss_everywhere):
        Pair(llama(), call=call).train(given)


@pytest.mark.slow
def test_padded_positions_of_every_output_are_eagers() -> None:
    def compare(expected: Any, found: Any, batch: Batch) -> None:
        assert_close(found.logits, expected.logits, "logits", rel=1e-5, floor=1e-6)
        for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert_close(mine, theirs, "hidden states", rel=1e-5, floor=1e-6)
        for mine, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert_close(mine.keys, theirs.keys, "keys", rel=1e-5, floor=1e-6)

    call = lambda model, **batch: model(**batch, output_hidden_states=True, use_cache=True)  # noqa: E731
    pair = Pair(llama(), call=call)
    report = pair.train(right_padded(), compare)
    assert_way(report, "padded", len(SIZES))


@pytest.mark.slow
def test_a_first_look_at_pads_in_a_later_step_runs_that_step_again_and_later_ones_padded() -> None:
    looks = iter([False, False, True, False, False, True])

    def call(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        found = model(**batch)
        return found.loss + (1e-2 * found.logits.square().mean() if look else 0.0)

    pair = Pair(llama(), call=call)
    given = right_padded() + right_padded()[:2]
    for batch, look in zip(given, looks, strict=True):  # noqa: B007, read by `call`
        pair.step(batch)
    assert_same_parameters(pair.reference, pair.model)
    report = LEDGER.report()
    counts = [report.total(f"steps_{name}") for name in ("profiled", "packed", "replayed", "padded")]
    assert counts == [1, 2, 1, 3], describe(report)
    (region,) = report.regions
    assert any("test_outputs.py" in use and "padded positions" in use for use in region.outputs["logits"])


def test_a_step_that_runs_again_draws_what_eager_draws() -> None:
    model = bert(hidden_dropout_prob=0.3)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    for number, batch in enumerate(right_padded()):
        torch.manual_seed(number)
        wanted = without_labels(reference, batch).last_hidden_state
        torch.manual_seed(number)
        found = without_labels(compiled, batch).last_hidden_state
        if number < 2:  # watched, and then packed without being looked at
            found[batch["attention_mask"].bool()].sum().backward()
            model.zero_grad()
            continue
        wanted.square().mean().backward()
        found.square().mean().backward()
        assert_close(found, wanted, "outputs")
        assert_same_gradients(reference, model)
        break
    assert LEDGER.report().regions[-1].steps_replayed == 1


def test_pads_looked_at_after_the_optimizers_step_are_the_old_ones() -> None:
    model = llama()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for number, batch in enumerate(right_padded()[:2]):
        wanted, found = reference(**batch), compiled(**batch)
        for each, optimizer in zip((wanted, found), optimizers, strict=True):
            each.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:  # watched: whatever comes then
            reference_logits = wanted.logits
            first = found.logits
        else:
            real = batch["attention_mask"].bool()
            assert_close(found.logits[real], wanted.logits[real], "logits at tokens", rel=1e-5)
            assert_close(found.logits, wanted.logits, "logits", rel=1e-5)
    assert_close(first, reference_logits, "logits of the first step", rel=1e-6)


def test_a_gradient_of_pads_reaches_weights_that_have_stepped_with_the_values_of_its_step() -> None:
    model, before = llama(), LEDGER.report().total("steps_replayed")
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for number, batch in enumerate(right_padded()):
        wanted, found = reference(**batch), compiled(**batch)
        if number == 2:
            wanted.logits.square().mean().backward(retain_graph=True)  # before the step: eager raises behind it
        else:
            wanted.loss.backward()
            found.loss.backward()
        gradients = [each.grad.clone() for each in reference.parameters() if each.grad is not None]
        if number == 2:
            found.loss.backward(retain_graph=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number == 2:
            found.logits.square().mean().backward()
            for one, other in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(other.grad, one, rtol=1e-4, atol=1e-6)
            break
    assert LEDGER.report().total("steps_replayed") == before + 1


NUM_WORDS = 96  # as many as ids of `right_padded` have


class Buffered(nn.Module):
    """A decoder of one attention, whose logits are scaled by a buffer, and which keeps a value with a history."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_WORDS, 32), nn.Linear(32, NUM_WORDS)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(NUM_WORDS))
        self.register_buffer("state", torch.zeros(32))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        rows, positions, _ = x.shape
        seen = torch.full((positions, positions), float("-inf")).triu(1)[None, None]
        seen = seen + torch.where(attention_mask[:, None, None, :].bool(), 0.0, torch.finfo(x.dtype).min)
        q, k, v = (f(x).view(rows, positions, 2, 16).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + y.transpose(1, 2).reshape(rows, positions, 32)
        self.state.copy_(self.query.bias * 2)
        logits = self.head(x) * self.scale
        return F.cross_entropy(logits[:, :-1].reshape(-1, NUM_WORDS), labels[:, 1:].reshape(-1)), logits


def _stepped(change: Callable[[Any], object]) -> tuple[Any, Any, torch.Tensor]:
    """Eager's logits and ours of a third step, after both models have been changed; and which positions are real."""
    model = Buffered()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)]
    for number, batch in enumerate(right_padded()[:3]):
        outputs = [each(**batch) for each in (reference, compiled)]
        for (loss, _), optimizer, each in zip(outputs, optimizers, (reference, model), strict=True):
            loss.backward(retain_graph=True)
            each.state.detach_()
            if number == 2:
                with torch.no_grad():
                    change(each)
            optimizer.step()
            optimizer.zero_grad()
    (_, wanted), (_, found) = outputs
    return wanted, found, batch["attention_mask"].bool()


def test_a_region_that_writes_a_value_with_a_history_is_replayed() -> None:
    wanted, found, real = _stepped(lambda model: None)
    assert_close(found[real].detach(), wanted[real].detach(), "logits at tokens", rel=1e-5)
    assert_close(found.detach() + 0.0, wanted.detach(), "logits", rel=1e-5)


@pytest.mark.parametrize(
    "change", [lambda model: model.scale.fill_(2.0), lambda model: model.head.weight.data.mul_(0.5)]
)
@pytest.mark.parametrize("look", [lambda logits, real: logits[real], lambda logits, real: logits.cos()])
def test_what_no_optimizer_has_changed_is_an_error_and_never_another_number(
    change: Callable[[Any], object], look: Callable[..., Any]
) -> None:
    _, found, real = _stepped(change)
    with pytest.raises(DeferredError):
        look(found, real)


def test_several_calls_before_a_backward_are_watched_together() -> None:
    def call(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        calls = [without_labels(model, batch).last_hidden_state for _ in range(3)]
        views = [each.mean(1) for each in calls]
        return (views[0] - 0.5 * views[1]).square().sum() + (views[1] - 0.5 * views[2]).square().sum()

    pair = Pair(bert(), call=call)
    report = pair.train(right_padded()[:2])
    assert (report.total("steps_profiled"), report.total("steps_packed")) == (3, 0), describe(report)
    assert report.total("steps_replayed") == 0


@pytest.mark.parametrize("how", ["hook", "retain_grad", "autograd.grad"])
def test_gradients_of_outputs_are_eagers(how: str) -> None:
    seen: dict[int, list[torch.Tensor]] = {}

    def call(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        found = model(**batch)
        kept = seen.setdefault(id(model), [])
        if how == "hook":
            found.logits.register_hook(lambda gradient: kept.append(gradient.clone()))
        elif how == "retain_grad":
            found.logits.retain_grad()
            found.loss.register_hook(lambda _: kept.append(found.logits))
        else:
            kept += torch.autograd.grad(found.loss, found.logits, retain_graph=True)
        return found.loss

    pair = Pair(llama(), call=call)
    report = pair.train(right_padded())
    assert report.total("steps_packed") == 0, describe(report)
    wanted, found = seen.values()
    assert len(wanted) == len(found) == len(SIZES)
    for mine, theirs in zip(found, wanted, strict=True):
        if how == "retain_grad":
            mine, theirs = mine.grad, theirs.grad
        assert_close(mine, theirs, "gradient of logits")


def penalised(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    loss = ignoring_pads(model, **batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 1e-2 * sum(each.square().sum() for each in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
def test_a_gradient_penalty_from_any_step_on_is_eagers(first: int) -> None:
    steps = iter(range(len(SIZES)))

    def call(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        return (penalised if number >= first else ignoring_pads)(model, **batch)

    pair = Pair(llama(attn_implementation="eager"), call=call, options=COMPILED)
    for number, batch in zip(steps, right_padded(), strict=True):  # noqa: B007, read by `call`
        pair.step(batch)
    assert_same_parameters(pair.reference, pair.model)
    report = LEDGER.report()
    assert report.total("steps_packed") == max(0, first), describe(report)
    assert "create_graph" in " ".join(report.regions[0].padded_because), describe(report)


@pytest.mark.slow
def test_two_backwards_through_one_step_stay_packed() -> None:
    model = llama()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    for batch in right_padded():
        for each, run in ((reference, reference), (model, compiled)):
            found = run(**batch)
            found.loss.backward(retain_graph=True)
            (2 * found.loss).backward()
            del each
        assert_same_gradients(reference, model)


def test_weights_behind_outputs_that_nobody_uses_have_no_gradient() -> None:
    model = bert()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.1) for each in (reference, model)]
    for number, batch in enumerate(right_padded()):
        for each in (reference, compiled):
            found = without_labels(each, batch)
            # Not a sum of squares: behind a normalisation it has no gradient but rounding, which AdamW makes steps of.
            loss = found.last_hidden_state[batch["attention_mask"].bool()].sin().mean()
            (loss + found.pooler_output.square().mean() if number == 1 else loss).backward()
        for name, weight in model.named_parameters():
            assert (weight.grad is None) == (reference.get_parameter(name).grad is None), (number, name)
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(reference, model)
    assert LEDGER.report().regions[-1].steps_packed == len(SIZES) - 1


@pytest.mark.slow
def test_a_decoder_without_a_mask_is_cut_after_its_last_label_and_shows_eagers_logits_all_the_same() -> None:
    torch.manual_seed(0)
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        vocab_size=96,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    seen: list[Any] = []

    def call(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        found = model(**batch)
        labels = batch["labels"]
        hits = (found.logits.detach().argmax(-1) == labels) & (labels != -100)
        seen.append(int(hits.sum()))
        return found.loss

    pair = Pair(hf.T5ForConditionalGeneration(config).train(), call=call)
    report = pair.train(right_padded())
    assert seen[::2] == seen[1::2]
    assert_way(report, "packed", len(SIZES))
    pair = Pair(
        hf.T5ForConditionalGeneration(config).train(), call=lambda model, **batch: model(**batch).logits.square().mean()
    )
    assert_way(pair.train(right_padded()), "padded", len(SIZES))


def test_outputs_of_a_call_without_gradients_require_none_outside_of_it_either() -> None:
    LEDGER.forget()
    model, given = llama(), right_padded()
    call = torch.compile(copy.deepcopy(model), backend="deepytorch", options=OPTIONS)
    for batch in given:
        with torch.no_grad():
            found, expected = call(**batch), model(**batch)
    assert LEDGER.report().total("steps_packed") == len(given) - 1
    real = given[-1]["attention_mask"].bool()
    for taken in (lambda logits: logits[real], lambda logits: logits[real].float().log_softmax(-1), torch.Tensor.exp):
        assert not taken(found.logits).requires_grad
        assert_close(taken(found.logits), taken(expected.logits), "logits", rel=1e-5, floor=1e-6)


@pytest.mark.slow
def test_without_deferred_outputs_every_value_is_there_at_once() -> None:
    pair = Pair(llama(), options={"defer_outputs": False})

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        assert type(found.logits) is torch.Tensor
        assert_close(found.logits, expected.logits, "logits", rel=1e-5, floor=1e-6)

    pair.train(right_padded(), compare)


@pytest.mark.slow
def test_steps_are_compared_with_eager_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH", "verify")
    monkeypatch.setenv("DEEPYTORCH_VERIFY_EVERY", "2")
    pair = Pair(llama(), call=ignoring_pads)
    report = pair.train(right_padded() + right_padded()[:2])
    (region,) = report.regions
    assert (region.steps_packed, region.verified_steps) == (5, 3), describe(report)
    assert 0 < region.largest_difference < 1e-4
    assert region.verify_seconds > 0


@pytest.mark.slow
def test_a_packed_step_that_differs_from_eager_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPYTORCH", "verify")
    from deepytorch.passes.ops import varlen_attention_cpu

    forward = varlen_attention_cpu.forward
    monkeypatch.setattr(
        varlen_attention_cpu, "forward", lambda *args, **kwargs: tuple(1.01 * x for x in forward(*args, **kwargs))
    )
    pair = Pair(llama(), call=ignoring_pads)
    report = pair.train(right_padded())
    assert_way(report, "padded", len(SIZES))
    assert "packed and eager steps differ" in caplog.text
