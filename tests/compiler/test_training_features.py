"""What people do around a training step: checkpointing, mixed precision, dropout, saving, evaluating, generating."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from deepytorch.errors import DeferredError
from tests.compiler.parity import (
    COMPILED,
    IGNORED,
    OPTIONS,
    Batch,
    Pair,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    causal_batch,
    compare_at_tokens,
    expect_packed,
    masked_lm_batch,
)
from tests.compiler.plain_models import DIM, SIZES, Plain, filled, sdpa_bool

hf = pytest.importorskip("transformers")

GIVEN = ((4, 11, "right"), (3, 13, "left"), (5, 9, "mixed"))


def llama(layers: int = 1, **kwargs: Any) -> Any:
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 1, **kwargs,
    }  # fmt: skip
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config)).train()


def with_gelu_dropout(p: float) -> nn.Module:
    """A plain transformer with dropout in its attention, its residuals and its embeddings."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain(attend)

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
            return self.inner(input_ids, attention_mask, labels)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool(), dropout_p=p)
        return F.dropout(out, p, training=True)

    return Dropping().train()


# ------------------------------------------------------------------------------------------ activation checkpointing


@pytest.mark.slow
def test_gradient_checkpointing_of_hugging_face_trains_as_eager_does() -> None:
    model = llama(layers=2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pair = Pair(model, options=COMPILED)
    expect_packed(pair.train(batches(causal_batch, *GIVEN), compare_at_tokens()), steps=3)


def test_checkpointed_blocks_of_a_plain_model_train_as_eager_does() -> None:
    class Checkpointed(Plain):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
            x = self.tokens(input_ids)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, attention_mask, use_reentrant=False)
            return self.loss(self, self.norm(x), attention_mask, labels)

    pair = Pair(Checkpointed(sdpa_bool).train(), options=COMPILED)
    expect_packed(pair.train(batches(masked_lm_batch, *GIVEN)), steps=3)


# ------------------------------------------------------------------------------------------ mixed precision


def rmse(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    squares = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(wanted, found, strict=True))
    return (squares / sum(a.numel() for a in wanted)) ** 0.5


@pytest.mark.parametrize(
    "where", [pytest.param("around the compiled model", marks=pytest.mark.slow), "inside the compiled model"]
)
def test_bf16_autocast_is_as_near_to_fp64_as_eagers_is(where: str) -> None:
    class Inside(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(**batch)

    model = llama()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    LEDGER.forget()
    inside = where.startswith("inside")
    compiled = torch.compile(Inside(model) if inside else model, backend="deepytorch", options=OPTIONS)
    for batch in batches(causal_batch, *GIVEN):
        exact(**batch).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = eager(**batch).loss
        if inside:
            found = compiled(**batch).loss
        else:
            with torch.autocast("cpu", torch.bfloat16):
                found = compiled(**batch).loss
        assert found.dtype == wanted.dtype
        wanted.backward()
        found.backward()
    truth, eagers, ours = ([p.grad for p in m.parameters()] for m in (exact, eager, model))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert rmse(truth, ours) <= 2 * rmse(truth, eagers) + 1e-4
    expect_packed(LEDGER.report(), steps=3)


@pytest.mark.slow
def test_a_model_in_bf16_is_as_near_to_fp64_as_eagers_is() -> None:
    model = llama().bfloat16()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    LEDGER.forget()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    for batch in batches(causal_batch, *GIVEN):
        for each in (exact, eager, compiled):
            each(**batch).loss.backward()
    truth, eagers, ours = ([p.grad for p in m.parameters()] for m in (exact, eager, model))
    assert rmse(truth, ours) <= 2 * rmse(truth, eagers) + 1e-4
    expect_packed(LEDGER.report(), steps=3)


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.slow
def test_the_same_seed_draws_the_same_dropout() -> None:
    model = with_gelu_dropout(0.2)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    batch = batches(masked_lm_batch, (4, 11, "right"))[0]

    def draw(seed: int) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        loss = compiled(**batch)
        loss.backward()
        return loss.item(), model.inner.head.weight.grad.clone()

    compiled(**batch)
    one, same, other = draw(3), draw(3), draw(4)
    assert one[0] == same[0]
    assert torch.equal(one[1], same[1])
    assert one[0] != other[0]


@pytest.mark.slow
def test_dropout_has_eagers_distribution() -> None:
    LEDGER.forget()
    model = with_gelu_dropout(0.3)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    batch = batches(masked_lm_batch, (6, 12, "right"))[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that dropout matters to the loss
    wanted, found = (
        torch.tensor([each(**batch).item() for _ in range(300)], dtype=torch.float64) for each in (model, compiled)
    )
    assert wanted.std() > 0
    error = (wanted.var() / 300 + found.var() / 300).sqrt()
    assert abs(wanted.mean() - found.mean()) < 4 * error
    assert 0.75 < found.std() / wanted.std() < 1.33
    expect_packed(LEDGER.report(), steps=300)


@pytest.mark.slow
def test_a_model_with_dropout_learns() -> None:
    model = with_gelu_dropout(0.1)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = batches(masked_lm_batch, (4, 11, "right"))[0]
    losses = []
    for _ in range(30):
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


# ------------------------------------------------------------------------------------------ saving and loading


@pytest.mark.slow
def test_a_model_compiled_in_place_saves_under_its_own_names_and_resumes() -> None:
    given = batches(causal_batch, *GIVEN, (4, 10, "left"))
    straight, start = llama(), None
    start = copy.deepcopy(straight.state_dict())

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(model: Any, optimizer: Any, some: list[Batch]) -> None:
        for batch in some:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = optimizer_of(straight)
    train(straight, optimizer, given)

    first = llama()
    first.load_state_dict(start)
    first.compile(backend="deepytorch", options=OPTIONS)
    optimizer = optimizer_of(first)
    train(first, optimizer, given[:2])
    assert not [name for name in first.state_dict() if "_orig_mod" in name]
    saved = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    found = torch.load(saved, weights_only=True)

    second = llama()
    second.load_state_dict(found["model"])
    second.compile(backend="deepytorch", options=OPTIONS)
    optimizer = optimizer_of(second)
    optimizer.load_state_dict(found["optimizer"])
    train(second, optimizer, given[2:])
    assert_same_parameters(straight, second)


@pytest.mark.slow
def test_weights_loaded_while_compiled_are_used() -> None:
    pair = Pair(llama(), options=COMPILED)
    given = batches(causal_batch, *GIVEN)
    pair.step(given[0])
    other = llama().state_dict()
    for model in (pair.reference, pair.model):
        model.load_state_dict(other)
    pair.step(given[1])
    assert LEDGER.report().total("recompiles") == 0


# ------------------------------------------------------------------------------------------ outputs


@pytest.mark.slow
def test_logits_read_after_the_optimizers_step_are_those_of_before_it() -> None:
    pair = Pair(llama())
    for batch in batches(causal_batch, *GIVEN):
        wanted, found = pair.reference(**batch), pair.compiled(**batch)
        for out, optimizer in zip((wanted, found), pair.optimizers, strict=True):
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-4, atol=1e-5)
        assert found.logits.argmax(-1).shape == batch["labels"].shape


@pytest.mark.slow
def test_a_loss_made_of_the_logits_reaches_every_weight() -> None:
    pair = Pair(llama())
    for batch in batches(causal_batch, *GIVEN):
        real = batch["attention_mask"].bool()
        for model in (pair.reference, pair.compiled):
            out = model(**batch)
            (out.loss + 0.1 * out.logits[real].square().mean()).backward()
        assert_same_gradients(pair.reference, pair.model)


@pytest.mark.slow
def test_the_key_value_cache_of_a_training_step_is_that_of_eager() -> None:
    pair = Pair(llama(use_cache=True))
    for batch in batches(causal_batch, *GIVEN):
        wanted, found = pair.reference(**batch), pair.compiled(**batch)
        real = batch["attention_mask"].bool()
        for one, other in zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True):
            assert one.keys.shape == other.keys.shape
            for name in ("keys", "values"):
                a, b = getattr(one, name).transpose(1, 2)[real], getattr(other, name).transpose(1, 2)[real]
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_outputs_kept_over_many_steps_stay_what_they_were() -> None:
    pair = Pair(llama())
    kept = []
    for batch in batches(causal_batch, *GIVEN):
        wanted, found = pair.reference(**batch), pair.compiled(**batch)
        kept.append((wanted.logits.detach(), found.logits.detach(), batch["attention_mask"].bool()))
        wanted.loss.backward()
        found.loss.backward()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, found, real in kept:
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)


def test_a_batch_overwritten_before_its_logits_are_read_raises_instead_of_lying() -> None:
    model = llama()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    batch = batches(causal_batch, (4, 11, "right"))[0]
    wanted = model(**batch).logits.detach()
    real = batch["attention_mask"].bool().clone()
    out = compiled(**batch)
    batch["input_ids"].fill_(5)
    try:
        found = out.logits
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
    except DeferredError:
        pass


@pytest.mark.slow
def test_outputs_can_be_asked_for_in_every_step() -> None:
    pair = Pair(llama(), options={"defer_outputs": False})
    report = pair.train(batches(causal_batch, *GIVEN), compare_at_tokens())
    expect_packed(report, steps=3)
    assert not [change for region in report.regions for change in region.changes if "when it is used" in change]


# ------------------------------------------------------------------------------------------ evaluation and generation


@pytest.mark.slow
def test_evaluation_between_training_steps_gives_eagers_losses() -> None:
    pair = Pair(llama())
    given = batches(causal_batch, *GIVEN, (4, 10, "left"))
    for train_batch, eval_batch in zip(given[:2], given[2:], strict=True):
        pair.step(train_batch)
        for model in (pair.reference, pair.model):
            model.eval()
        with torch.no_grad():
            wanted, found = pair.reference(**eval_batch), pair.compiled(**eval_batch)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
        real = eval_batch["attention_mask"].bool()
        torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-4, atol=1e-5)
        assert not found.logits.requires_grad
        for model in (pair.reference, pair.model):
            model.train()
    expect_packed(LEDGER.report(), steps=4, padded=0)


@pytest.mark.slow
def test_inference_mode_works() -> None:
    model = llama().eval()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    for batch in batches(causal_batch, *GIVEN[:2]):
        with torch.inference_mode():
            wanted, found = model(**batch), compiled(**batch)
            real = batch["attention_mask"].bool()
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_generates_what_eager_generates() -> None:
    model = llama(layers=2)
    reference = copy.deepcopy(model)
    model.compile(backend="deepytorch", options=OPTIONS)
    batch = batches(causal_batch, (3, 8, "left"))[0]
    model(**batch).loss.backward()
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    wanted, found = (
        each.eval().generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=1) for each in (reference, model)
    )
    assert torch.equal(found, wanted)


# ------------------------------------------------------------------------------------------ several models, parameters


@pytest.mark.slow
def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    one, two = Pair(llama()), None
    first = LEDGER.report()
    two = Pair(Plain(sdpa_bool).train())
    for left, right in zip(batches(causal_batch, *GIVEN), batches(masked_lm_batch, *SIZES), strict=False):
        one.step(left)
        two.step(right)
    assert_same_parameters(one.reference, one.model)
    assert_same_parameters(two.reference, two.model)
    del first
    expect_packed(LEDGER.report(), steps=6, padded=0)


def test_one_class_compiled_twice_keeps_both_weights_apart() -> None:
    pairs = [Pair(Plain(sdpa_bool).train()) for _ in range(2)]
    for batch in batches(masked_lm_batch, *SIZES[:2]):
        for pair in pairs:
            pair.step(batch)
    for pair in pairs:
        assert_same_parameters(pair.reference, pair.model)


@pytest.mark.slow
def test_frozen_weights_get_no_gradient_and_the_others_the_right_one() -> None:
    model = llama(layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    pair = Pair(model)
    expect_packed(pair.train(batches(causal_batch, *GIVEN), compare_at_tokens()), steps=3)
    assert all(p.grad is None for p in model.model.layers[0].parameters())


@pytest.mark.slow
def test_adapters_beside_frozen_weights_train_as_eager_does() -> None:
    class Adapted(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, linear.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + 2.0 * self.up(self.down(x))

    model = Plain(filled).requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    expect_packed(Pair(model.train()).train(batches(masked_lm_batch, *SIZES)), steps=4)


@pytest.mark.slow
def test_gradient_clipping_and_scaling_see_eagers_gradients() -> None:
    pair = Pair(llama())
    for batch in batches(causal_batch, *GIVEN):
        norms = []
        for model, module, optimizer in zip(
            (pair.reference, pair.compiled), (pair.reference, pair.model), pair.optimizers, strict=True
        ):
            (model(**batch).loss * 128).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-6)
    assert_same_parameters(pair.reference, pair.model)


@pytest.mark.slow
def test_hooks_on_the_model_are_called_with_padded_shapes() -> None:
    model = llama()
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.logits.shape)))
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    for batch in batches(causal_batch, *GIVEN):
        compiled(**batch).loss.backward()
    assert seen == [(rows, positions, 96) for rows, positions, _ in GIVEN]


@pytest.mark.slow
def test_a_model_without_labels_that_count_in_this_batch_still_gives_logits() -> None:
    model = llama()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    batch = batches(causal_batch, (4, 11, "right"))[0]
    compiled(**batch)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    real = batch["attention_mask"].bool()
    wanted, found = model(**batch), compiled(**batch)
    assert found.loss.isnan() == wanted.loss.isnan()
    torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_double_compilation_with_another_backend_still_trains() -> None:
    """The same module under stock's backend afterwards: nothing of ours is left in it."""
    pair = Pair(Plain(sdpa_bool).train())
    given = batches(masked_lm_batch, *SIZES)
    pair.step(given[0])
    stock = torch.compile(pair.model, backend="aot_eager")
    stock(**given[1]).backward()
    pair.reference(**given[1]).backward()
    assert_same_gradients(pair.reference, pair.model)
