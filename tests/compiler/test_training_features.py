"""What people do around a training step: checkpointing, mixed precision, dropout. `tests/scripts` has the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    COMPILED,
    OPTIONS,
    Pair,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    causal_batch,
    compare_at_tokens,
    expect_packed,
    masked_lm_batch,
)
from tests.compiler.plain_models import SIZES, Plain, sdpa_bool

hf = pytest.importorskip("transformers")

GIVEN = ((4, 11, "right"), (3, 13, "left"), (5, 9, "mixed"))


def llama(layers: int = 1, **kwargs: Any) -> Any:
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 1, **kwargs,
    }  # fmt: skip
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config)).train()


def with_dropout(p: float) -> nn.Module:
    """A plain transformer with dropout in its attention and behind it."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool(), dropout_p=p)
        return F.dropout(out, p, training=True)

    return Plain(attend).train()


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
    "where",
    [
        pytest.param("autocast around the compiled model", marks=pytest.mark.slow),
        "autocast inside the compiled model",
        pytest.param("weights", marks=pytest.mark.slow),
    ],
)
def test_bf16_is_as_near_to_fp64_as_eagers_is(where: str) -> None:
    class Inside(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(**batch)

    model, inside = llama(), "inside" in where
    if where == "weights":
        model.bfloat16()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    LEDGER.forget()
    compiled = torch.compile(Inside(model) if inside else model, backend="deepytorch", options=OPTIONS)
    for batch in batches(causal_batch, *GIVEN):
        exact(**batch).loss.backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=where != "weights"):
            wanted = eager(**batch).loss
        with torch.autocast("cpu", torch.bfloat16, enabled="around" in where):
            found = compiled(**batch).loss
        assert found.dtype == wanted.dtype
        wanted.backward()
        found.backward()
    truth, eagers, ours = ([p.grad for p in m.parameters()] for m in (exact, eager, model))
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]
    assert rmse(truth, ours) <= 2 * rmse(truth, eagers) + 1e-4
    expect_packed(LEDGER.report(), steps=3)


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.slow
def test_the_same_seed_draws_the_same_dropout() -> None:
    model = with_dropout(0.2)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    batch = batches(masked_lm_batch, (4, 11, "right"))[0]

    def draw(seed: int) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        loss = compiled(**batch)
        loss.backward()
        return loss.item(), model.head.weight.grad.clone()

    compiled(**batch)
    one, same, other = draw(3), draw(3), draw(4)
    assert one[0] == same[0]
    assert torch.equal(one[1], same[1])
    assert one[0] != other[0]


@pytest.mark.slow
def test_dropout_has_eagers_distribution() -> None:
    LEDGER.forget()
    model = with_dropout(0.3)
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


# ------------------------------------------------------------------------------------------ around a step


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


def test_one_class_compiled_twice_keeps_both_weights_apart() -> None:
    pairs = [Pair(Plain(sdpa_bool).train()) for _ in range(2)]
    for batch in batches(masked_lm_batch, *SIZES[:2]):
        for pair in pairs:
            pair.step(batch)
    for pair in pairs:
        assert_same_parameters(pair.reference, pair.model)


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
