"""Training on a GPU, where there is one: packed by the flash kernels in half precision, by the dense form in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import (
    OPTIONS,
    Batch,
    Pair,
    batches,
    causal_batch,
    compare_at_tokens,
    describe,
    expect_packed,
    masked_lm_batch,
    mixture,
)

hf = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu
WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(attn_implementation="sdpa", num_key_value_heads=2, **WIDTHS))


def mistral() -> nn.Module:
    config = hf.MistralConfig(attn_implementation="sdpa", num_key_value_heads=2, sliding_window=4, **WIDTHS)
    return hf.MistralForCausalLM(config)


def bert() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(attn_implementation="sdpa", **WIDTHS, **still))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0,
            dropout_rate=0.0, attn_implementation="sdpa",
        )
    )  # fmt: skip


def seq2seq_batch(rows: int, positions: int, padding: str, generator: torch.Generator) -> Batch:
    batch = causal_batch(rows, positions, padding, generator)
    labels = torch.randint(5, 96, (rows, positions // 2), generator=generator)
    return {**batch, "labels": labels.masked_fill(torch.arange(positions // 2) >= positions // 2 - 1, -100)}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "llama": (llama, causal_batch),
    "mistral": (mistral, causal_batch),
    "bert": (bert, masked_lm_batch),
    "t5": (t5, seq2seq_batch),
}


def on_gpu(given: list[Batch]) -> list[Batch]:
    return [{name: tensor.cuda() for name, tensor in batch.items()} for batch in given]


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
@pytest.mark.parametrize("build, make", FAMILIES.values(), ids=FAMILIES.keys())
def test_single_precision_trains_as_eager_does(
    build: Callable[[], nn.Module], make: Callable[..., Batch], lowering: str
) -> None:
    pair = Pair(build().cuda().train(), options={"lowering": lowering})
    holes = build is not mistral  # under a window they run padded
    sizes = [size for size in mixture() if holes or size[2] != "holes"]
    report = pair.train(on_gpu(batches(make, *sizes)), compare_at_tokens() if make is causal_batch else None)
    expect_packed(report, steps=len(sizes), padded=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
@pytest.mark.parametrize("build, make", FAMILIES.values(), ids=FAMILIES.keys())
def test_half_precision_is_as_near_to_single_as_eager_is(
    build: Callable[[], nn.Module], make: Callable[..., Batch], lowering: str, dtype: torch.dtype
) -> None:
    """The rule of PyTorch's own benchmarks: at most three times as far off as eager in that precision, and a bit."""
    LEDGER.forget()
    exact = build().cuda().train()
    eager, ours = copy.deepcopy(exact), copy.deepcopy(exact)
    compiled = torch.compile(ours, backend="deepytorch", options={**OPTIONS, "lowering": lowering})
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.05)
    sizes = [size for size in mixture() if size[2] != "holes"]
    for batch in on_gpu(batches(make, *sizes)):
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, model, call in (("exact", exact, exact), ("eager", eager, eager), ("ours", ours, compiled)):
            model.zero_grad()
            with torch.autocast("cuda", dtype, enabled=name != "exact"):
                loss = call(**batch).loss
            (loss * 64).backward()
            found[name] = {"loss": loss.detach().double().reshape(1), **_gradients(model)}
        for name, wanted in found["exact"].items():
            near = (found["eager"][name] - wanted).norm() * 3 + 1e-4 * wanted.norm() + 1e-5
            off = (found["ours"][name] - wanted).norm()
            assert off <= near, f"{name}: {dtype} off by {off:.3g}, {near:.3g} allowed"
        optimizer.step()
        for model in (eager, ours):
            model.load_state_dict(exact.state_dict())
    expect_packed(LEDGER.report(), steps=len(sizes), padded=0)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def test_weights_in_half_precision_train() -> None:
    LEDGER.forget()
    model = llama().to("cuda", torch.bfloat16).train()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    [batch] = on_gpu(batches(causal_batch, (4, 16, "right")))
    losses = []
    for _ in range(8):
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    expect_packed(LEDGER.report(), steps=8)


def test_dropout_in_attention_drops_what_it_should() -> None:
    LEDGER.forget()
    config = hf.BertConfig(
        attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5, **WIDTHS
    )
    model = hf.BertForMaskedLM(config).cuda().train()
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    [batch] = on_gpu(batches(masked_lm_batch, (6, 24, "right")))
    losses = torch.stack([compiled(**batch).loss.detach() for _ in range(40)])
    eager = torch.stack([model(**batch).loss.detach() for _ in range(40)])
    assert losses.std() > 0, "nothing was dropped"
    error = (losses.var() / 40 + eager.var() / 40).sqrt()
    assert (losses.mean() - eager.mean()).abs() < 5 * error
    expect_packed(LEDGER.report())


def test_changing_lengths_do_not_recompile() -> None:
    pair = Pair(llama().cuda().train(), options={"lowering": "inductor"})
    sizes = [(2 + i % 4, 9 + 5 * i, ("right", "left", "mixed")[i % 3]) for i in range(8)]
    report = pair.train(on_gpu(batches(causal_batch, *sizes)))
    assert report.total("recompiles") == 0, describe(report)
