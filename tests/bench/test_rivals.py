"""Rivals train on the same rows with the same losses, and who cannot run is named: else they were no fair ones."""

from __future__ import annotations

import pytest
import torch

from deepytorch.bench import rivals
from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.bench.rivals import OWN_ATTENTION, flatten, flattened_unavailable, grouped, register_attention
from deepytorch.bench.training_step import Precision, compiled_setup, forward_backward
from deepytorch.bench.unpad_steps import draw_batches
from deepytorch.data import IGNORE_INDEX, num_labels, num_positions, num_tokens

VOCAB_SIZE = 300
CPU = Precision(torch.device("cpu"))
GPU_BF16 = Precision(torch.device("cuda"), torch.bfloat16)


@pytest.fixture
def batch():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids = torch.randint(4, VOCAB_SIZE, mask.shape) * mask
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # a prompt
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_a_flattened_row_has_labels_inside_of_its_parts(batch):
    ids, flat = batch["input_ids"], flatten(batch)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert flat[name].tolist() == [0, 3, 8, 10]
        assert flat[name].dtype == torch.int32
    assert flat["max_length_q"] == flat["max_length_k"] == 5
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert flat["input_ids"].tolist() == [[*ids[0, :3].tolist(), *ids[1].tolist(), *ids[2, :2].tolist()]]
    assert flat["labels"].tolist() == [
        [-100, *ids[0, 1:3].tolist(), -100, *ids[1, 1:].tolist(), -100, ids[2, 1].item()]
    ]


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", OWN_ATTENTION), ("qwen2", OWN_ATTENTION), ("gpt2", OWN_ATTENTION), ("llama", "sdpa")],
)
def test_loss_and_gradients_are_those_of_the_padded_batch(name, attention, batch):
    register_attention()
    models = [
        build_model(name, "tiny", vocab_size=VOCAB_SIZE, attn_implementation=each) for each in ("sdpa", attention)
    ]
    padded, packed = (compiled_setup("eager", model, None) for model in models)
    losses = [forward_backward(setup, x, CPU).loss for setup, x in ((padded, batch), (packed, flatten(batch)))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert max_relative_difference(packed.model, padded.model) < 1e-5


def test_own_attention_has_the_windows_and_sinks_of_a_model(batch):
    register_attention()
    models = [
        build_model("gpt_oss", "tiny", vocab_size=VOCAB_SIZE, attn_implementation=each)
        for each in ("sdpa", OWN_ATTENTION)
    ]
    for model in models:
        model.config.sliding_window = 2  # of rows of up to 5 tokens
        for layer in model.model.layers:
            layer.self_attn.sliding_window = layer.self_attn.sliding_window and 2
            torch.nn.init.normal_(layer.self_attn.sinks, generator=torch.Generator().manual_seed(0))
    padded, packed = (compiled_setup("eager", model, None) for model in models)
    losses = [forward_backward(setup, x, CPU).loss for setup, x in ((padded, batch), (packed, flatten(batch)))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert max_relative_difference(packed.model, padded.model) < 1e-5


def texts_of(batch):
    keep = [row[row != IGNORE_INDEX].tolist() for row in batch["labels"]]
    ids = [row[on.bool()].tolist() for row, on in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return list(zip(ids, keep, strict=True))


@pytest.mark.parametrize("model", ["llama", "bart"])
def test_grouped_batches_hold_the_same_rows_with_fewer_pads(job, model):
    kind = batch_kind(model)
    data = draw_batches(job(model, steps=4), CPU.device)
    made = grouped(data, kind)
    assert [len(batch["input_ids"]) for batch in made] == [4] * 4
    assert sorted(row for batch in made for row in texts_of(batch)) == sorted(
        row for batch in data for row in texts_of(batch)
    )
    for count in (num_positions, num_tokens):
        one, other = (sum(count(batch, kind) for batch in each) for each in (made, data))
        assert one < other if count is num_positions else one == other
    assert sum(map(num_labels, made)) == sum(map(num_labels, data))


def test_who_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: None if name == "liger_kernel" else "there")
    assert flattened_unavailable("causal", "model", "llama", GPU_BF16) == "liger-kernel not installed"
    monkeypatch.setattr(rivals, "find_spec", lambda name: "there")
    monkeypatch.setattr(rivals, "_liger", lambda family: None if family == "gpt2" else "a patch")
    assert flattened_unavailable("causal", "model", "llama", GPU_BF16) is None
    assert flattened_unavailable("causal", "model", "gpt2", GPU_BF16) == "Liger has no kernels for gpt2"
    assert "CUDA" in flattened_unavailable("causal", "model", "llama", CPU)
    assert "bf16" in flattened_unavailable("causal", "model", "llama", Precision(GPU_BF16.device))
    assert "decoders" in flattened_unavailable("masked", "model", "bert", GPU_BF16)


def test_ligers_kernels_leave_other_models_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(rivals, "_liger", lambda family: lambda **given: asked.append((family, given)))
    model = build_model("llama", "tiny", vocab_size=VOCAB_SIZE)
    assert rivals.with_kernels(model, "liger", "llama") is model
    assert asked == [("llama", {"model": model, "rope": False})]
